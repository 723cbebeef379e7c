"""Where the samples of training come from in each features.mode: one loader per mode, chosen by name."""

import atexit
from typing import Callable, Mapping, NamedTuple, Optional, Sequence

import torch

from deepspec.artifacts import canonical_hash, read_manifest
from deepspec.config.paths import features_dir, model_cache, responses_dir
from deepspec.config.schema import Config
from deepspec.data.batch import Sample
from deepspec.data.feature_format import convention_of
from deepspec.data.rendering import Renderer
from deepspec.data.samples import SampleSet, load_samples
from deepspec.data.sources import CachedFeatures, Expected, FeatureSource, HiddenStateModel, OnlineFeatures
from deepspec.errors import ConfigError
from deepspec.stages.given_store import given_features
from deepspec.stages.hybrid import filling_features, store_is_finished
from deepspec.stages.served import served_target
from deepspec.stages.streamed import streamed_features
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.head import TargetHead, load_head

SPLITS = ("train", "held_out")
Target = FrozenTarget | TargetHead


class Data(NamedTuple):
    """Samples with hidden states; ``documents`` are the training ones without, where they are at hand."""

    train: FeatureSource
    documents: Optional[Sequence[Sample]]
    held_out: FeatureSource
    fingerprint: str
    # To be called by all ranks when training has ended, with whether the whole first epoch was trained on.
    done: Callable[[bool], None] = lambda first_epoch_over: None


def load_data(config: Config, target: Target) -> Data:
    """Training and held-out samples, from a store or through the target. Raises InputRefused for wrong ones."""
    if config.features.mode not in LOADERS:
        raise ConfigError(f"features.mode={config.features.mode!r} must be one of {', '.join(LOADERS)}.")
    return LOADERS[config.features.mode](config, target)


def needs_whole_target(config: Config) -> bool:
    """Whether training itself runs the target; else it needs two of its matrices only."""
    return config.features.mode in RUN_THE_TARGET or (
        config.features.mode == "hybrid" and not store_is_finished(config))


def needs_head_only(config: Config) -> bool:
    """Whether no stage of training can need the target's layers, so that they are never loaded."""
    layers = config.drafter.warm_start or config.trainer.decode_every > 0
    return config.features.mode in ("server", "disaggregated") and not layers


def compute_dtype(config: Config) -> torch.dtype:
    """What hidden states are handed to the drafter in."""
    return torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32


def responses_fingerprint(config: Config) -> Optional[str]:
    """Hash of the content of the responses; None while they are not finished."""
    responses = read_manifest(responses_dir(config))
    return canonical_hash(responses.files) if responses is not None and responses.status == "complete" else None


def expected_features(config: Config, target: Target) -> Expected:
    """What a store must hold to be of this run."""
    renderer = Renderer(target.tokenizer, config.target.thinking, config.target.name)
    return Expected(target_fingerprint=target.fingerprint, layers=tuple(config.target.feature_layers),
                    renderer_hash=renderer.hash, responses_fingerprint=responses_fingerprint(config),
                    convention=convention_of(target.family.streams))


def rendered_samples(config: Config, target: Target) -> list[SampleSet]:
    """Token ids and loss masks of the responses, by split."""
    return [
        load_samples(responses_dir(config), split, config.data.max_length, vocab_size=target.spec.vocab_size,
                     mask_token_id=config.target.mask_token_id) for split in SPLITS
    ]


def _cached(config: Config, target: Target) -> Data:
    expected, dtype = expected_features(config, target), compute_dtype(config)
    if config.features.path is not None:
        train, held_out, fingerprint = given_features(
            features_dir(config), expected, frozenset(config.features.allow), target_dtype=config.target.dtype,
            max_length=config.data.max_length, held_out_fraction=config.features.held_out_fraction, dtype=dtype,
            vocab_size=target.spec.vocab_size, mask_token_id=config.target.mask_token_id)
        return Data(train, None, held_out, fingerprint)
    stores = [CachedFeatures(features_dir(config), split=split, expected=expected, dtype=dtype) for split in SPLITS]
    return Data(stores[0], None, stores[1], stores[0].store.manifest.fingerprint)


def _server(config: Config, target: Target) -> Data:
    if config.features.server.store:
        return _cached(config, target)
    head = target if isinstance(target, TargetHead) else load_head(
        config.target, device=target.device, cache_dir=model_cache(config))
    served = served_target(config, head).__enter__()
    atexit.register(served.close)
    server, model = config.features.server, served.facts["model"]
    data = _live(config, head, served)
    return data._replace(fingerprint=f"{data.fingerprint}:{server.engine}:{model}:{server.quantization}")


def _online(config: Config, target: Target) -> Data:
    assert isinstance(target, FrozenTarget), "loaded whole for this mode"
    return _live(config, target, target)


def _live(config: Config, target: Target, model: HiddenStateModel) -> Data:
    """Hidden states of ``model`` whenever samples are asked for."""
    samples = rendered_samples(config, target)
    budget, dtype = config.features.token_budget, compute_dtype(config)
    sources = [OnlineFeatures(model, part, token_budget=budget, dtype=dtype) for part in samples]
    return Data(sources[0], samples[0], sources[1], _live_fingerprint(config))


def _hybrid(config: Config, target: Target) -> Data:
    if store_is_finished(config):
        return _cached(config, target)
    assert isinstance(target, FrozenTarget), "loaded whole for this mode"
    dtype = compute_dtype(config)

    def opened(split: str) -> CachedFeatures:
        return CachedFeatures(features_dir(config), split=split, expected=expected, dtype=dtype)

    expected = expected_features(config, target)
    sources, fingerprint, done = filling_features(config, target, dtype, opened)
    return Data(sources[0], sources[0].documents, sources[1], fingerprint, done)


def _disaggregated(config: Config, target: Target) -> Data:
    samples = rendered_samples(config, target)
    head = target if isinstance(target, TargetHead) else load_head(
        config.target, device="cpu", cache_dir=model_cache(config))
    sources, close = streamed_features(config, head.fingerprint, samples, compute_dtype(config))
    return Data(sources[0], samples[0], sources[1], _live_fingerprint(config), lambda first_epoch_over: close())


def _live_fingerprint(config: Config) -> str:
    """The same for all modes that give the target's own numbers, so that a run may change between them."""
    return f"online:{responses_fingerprint(config)}:{config.data.max_length}"


LOADERS: Mapping[str, Callable[[Config, Target], Data]] = {
    "cached": _cached, "online": _online, "hybrid": _hybrid, "disaggregated": _disaggregated, "server": _server,
}
RUN_THE_TARGET = frozenset({"online"})
