"""Stage: train the drafter on the features of the responses; leaves checkpoints and metrics.jsonl in run.dir."""

import dataclasses
import logging
from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch
from torch import Tensor

from deepspec import distributed
from deepspec.config.paths import model_cache, run_dir
from deepspec.config.schema import Config, training_seed
from deepspec.data.batch import Sample
from deepspec.data.sources import FeatureSource
from deepspec.drafters.base import Drafter
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.drafters.vocabulary import choose_ids, count_tokens, coverage
from deepspec.drafters.warm_start import warm_start
from deepspec.errors import ConfigError, InputRefused
from deepspec.stages.confidence import held_out_requests
from deepspec.stages.division import begin_training
from deepspec.stages.feature_sources import Data, Target, load_data, needs_head_only, needs_whole_target
from deepspec.stages.tracked import read_result
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.head import load_head
from deepspec.targets.load import load_target
from deepspec.tracking import Tracker
from deepspec.training import checkpoint
from deepspec.training.identity import run_identity
from deepspec.training.live_decode import LiveDecoder
from deepspec.training.packs import Packer
from deepspec.training.session import shared_weights
from deepspec.training.trainer import DrafterTrainer, TrainResult
from deepspec.training.validate import make_validator

log = logging.getLogger(__name__)
JOB_TYPE = "train_drafter"


def run(config: Config) -> None:
    """Train, or continue, or say that there is nothing to do. Ends the process with 0 when SIGTERM asked for that."""
    begin_training()
    distributed.init()
    tracker = Tracker.start(dataclasses.asdict(config) | {"world_size": distributed.world_size()}, config.tracking,
                            config.run.name, run_dir(config), JOB_TYPE, id=_tracking_id(config))
    failed = True
    try:
        result = train(config, tracker)
        if distributed.rank() == 0:
            left = read_result(config, "train")
            if left.artifact is not None:
                tracker.artifact(left.artifact, left.inputs)
        failed = False
    finally:
        tracker.finish(failed)
    if result.stopped:
        log.info("stopped by a signal after step %d of %d; checkpoint saved, the same command continues from it",
                 result.step, result.total_steps)
        distributed.barrier()
        distributed.shutdown()
        raise SystemExit(0)


def train(config: Config, tracker: Tracker) -> TrainResult:
    """Put target, data, drafter and trainer together and run them."""
    device = distributed.device()
    # With features on disk the target is needed for two of its matrices only: the rest never reaches the GPU.
    whole = needs_whole_target(config) or config.trainer.decode_every > 0
    load = load_head if needs_head_only(config) else load_target
    target: Target = load(config.target, device=device if whole else "cpu", cache_dir=model_cache(config))
    shape = shape_from(target.spec, config.target, config.drafter)
    on_target = shared_weights(target)
    shared = dataclasses.replace(on_target, embed=on_target.embed.to(device), lm_head=on_target.lm_head.to(device))
    data = load_data(config, target)
    shape = with_draft_vocabulary(config, shape, data, target.spec.eos_token_ids)
    drafter = make_drafter(config, shape, shared, target)
    decoder = None
    if config.trainer.decode_every:
        assert isinstance(target, FrozenTarget), "loaded whole for real decoding"
        decoder = live_decoder(config, shape, shared, target)
    del target, on_target  # whatever still needs the target holds it
    identity = run_identity(config, shape, target=shared.fingerprint, data=data.fingerprint)
    packer = Packer(data.train, shape, config.trainer, config.objective, seed=training_seed(config),
                    num_workers=config.data.num_workers, documents=data.documents)
    validate = None
    if len(data.held_out):
        validate = make_validator(data.held_out, shape, config.trainer, config.objective, seed=config.run.seed,
                                  run_dir=run_dir(config), tracker=tracker, decoder=decoder)
    elif decoder is not None or config.trainer.early_stopping_patience is not None:
        key = "early_stopping_patience" if decoder is None else "decode_every"
        raise InputRefused(f"trainer.{key} needs held-out samples, but the features have none. Raise "
                           "data.min_held_out and make prompts, responses and features again.")
    trainer = DrafterTrainer(drafter, packer, config, identity=identity, tracker=tracker, validate=validate)
    log.info("training %.1f M parameters on %d samples: %d steps of %d samples", _millions(drafter), len(data.train),
             trainer.total_steps, config.trainer.global_batch_size)
    result = trainer.run()
    data.done(result.trained and not result.stopped and result.step >= trainer.per_epoch)
    if result.trained and result.row:
        tracker.summary({"final/loss": result.row["loss"],
                         "final/acceptance_length_proxy": result.row["acceptance_length_proxy"]})
        log.info("trained to step %d of %d: loss %.4f, acceptance length %.3f (analytic, training samples), %d skipped",
                 result.step, result.total_steps, result.row["loss"], result.row["acceptance_length_proxy"],
                 result.row["skipped_steps"])
    return result


def with_draft_vocabulary(config: Config, shape: DrafterShape, data: Data, ends: Sequence[int]) -> DrafterShape:
    """``shape`` with the tokens it may propose, the most frequent of the training answers, where there is a limit."""
    size = config.drafter.draft_vocab_size
    if size is None or size >= shape.vocab_size:
        return shape

    def pairs(source: FeatureSource, documents: Optional[Sequence[Sample]]) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(source)):
            sample = source.get([index])[0].sample if documents is None else documents[index]
            yield sample.input_ids, sample.loss_mask

    counts = count_tokens(pairs(data.train, data.documents), shape.vocab_size)
    ids = choose_ids(counts, size, ends)
    log.info("draft vocabulary: %d of %d tokens, %.2f %% of the training answers' tokens are among them", size,
             shape.vocab_size, 100 * (coverage(counts, ids) or 0.0))
    return dataclasses.replace(shape, draft_ids=ids)


def make_drafter(config: Config, shape: DrafterShape, shared: SharedWeights, target: Target) -> Drafter:
    """A drafter initialised from the seed, the target's last layers, or an exported drafter."""
    torch.manual_seed(training_seed(config))
    drafter = build_drafter(shape, shared, confidence_detach=config.objective.confidence_detach,
                            activation_checkpointing=config.trainer.activation_checkpointing,
                            attention=config.trainer.attention, compile=config.trainer.compile)
    if config.drafter.warm_start and config.drafter.init_from:
        raise ConfigError("drafter.warm_start and drafter.init_from both say where to start. Set one of them.")
    if config.drafter.warm_start:
        assert isinstance(target, FrozenTarget), "loaded whole for a warm start"
        count = warm_start(drafter, list(target.layers), target.final_norm_weight, target.stream_head)
        log.info("warm start: %d tensors copied from the target's last layers", count)
    if config.drafter.init_from:
        checkpoint.load_exported(drafter, Path(config.drafter.init_from))
        log.info("starting from the drafter in %s", config.drafter.init_from)
    return drafter


def live_decoder(config: Config, shape: DrafterShape, shared: SharedWeights, target: FrozenTarget) -> LiveDecoder:
    """Real decoding of up to ``trainer.decode_prompts`` held-out prompts every ``trainer.decode_every`` steps."""
    options = config.trainer
    return LiveDecoder(target, shape, shared, tuple(held_out_requests(config, options.decode_prompts)),
                       every=options.decode_every, max_new_tokens=options.decode_tokens, seed=config.run.seed)


def _tracking_id(config: Config) -> Optional[str]:
    if config.trainer.resume == "never":
        return None
    found = checkpoint.find_latest(run_dir(config))
    return checkpoint.read_state(found).tracking_id if found is not None else None


def _millions(drafter: Drafter) -> float:
    return sum(parameter.numel() for parameter in drafter.parameters()) / 1e6
