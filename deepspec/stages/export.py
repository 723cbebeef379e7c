"""Stage: everything an engine needs of the trained drafter, in ``run.dir/export/``."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspec import distributed
from deepspec.artifacts import is_complete
from deepspec.calibration.head import load_confidence
from deepspec.config.paths import model_cache, responses_dir, run_dir
from deepspec.config.schema import Config
from deepspec.data.samples import load_samples
from deepspec.errors import InputRefused
from deepspec.export.evidence import gather
from deepspec.export.exporter import ExportRequest, export_drafter, fingerprint, reverify
from deepspec.export.fold import fold_head, fold_of, folded_evidence
from deepspec.export.hub import push
from deepspec.export.launch import Origin
from deepspec.targets.load import locate
from deepspec.training.checkpoint import load_drafter
from deepspec.training.learned import quantization_of, warn_of_another_engine
from deepspec.training.session import load_run

logger = logging.getLogger(__name__)
_GATE_SAMPLES = 8


def _target_name(config: Config) -> str:
    """What a serve command needs: the hub id, or the absolute folder of a target that exists only here."""
    if config.target.source == "hf" and not Path(config.target.path).expanduser().is_dir():
        return config.target.path
    return str(locate(config.target, model_cache(config)).absolute())


def _documents(config: Config) -> list[Tensor]:
    """A few held-out samples for the shift gate; none where the responses are not on this machine."""
    try:
        samples = load_samples(responses_dir(config), "held_out", min(config.data.max_length, 512))
    except (InputRefused, FileNotFoundError) as error:
        logger.warning("no held-out samples for the gate on shifted layers: %s", error)
        return []
    return [samples[index].input_ids for index in range(min(_GATE_SAMPLES, len(samples)))]


def request_for(config: Config, session: Any) -> ExportRequest:
    """Everything the export of ``session`` (training.session.load_run) is made of."""
    directory = run_dir(config)
    # The session's drafter computes in the target's dtype; an export starts from the checkpoint's own fp32 weights.
    drafter = load_drafter(session.checkpoint, session.shared, session.weights)
    if drafter.confidence_head is not None:
        load_confidence(directory, drafter, session.drafter_sha256)
    target = session.target
    evidence = gather(directory, session.drafter_sha256, target.fingerprint, drafter.shape.draft_length,
                      drafter.shape.confidence_head)
    if config.export.fold_calibration:
        evidence = folded_evidence(evidence)
        fold_head(drafter, fold_of(evidence.calibration or {}))
    warn_of_another_engine(config, target.spec)
    learned = quantization_of(config, target.spec)
    origin = Origin(
        target=_target_name(config), revision=config.target.revision, target_fingerprint=target.fingerprint,
        target_architectures=tuple(target._model.config.architectures or ()), target_dtype=config.target.dtype,
        drafter_sha256=session.drafter_sha256, checkpoint=session.checkpoint.name,
        folder=str((directory / "export").absolute()), seed=config.run.seed, thinking=config.target.thinking,
        target_quantization=learned.target, features_quantization=learned.features,
    )
    return ExportRequest(
        config=config, target=target, drafter=drafter.eval(), origin=origin,
        evidence=evidence,
        records=directory / "profile" / "records.jsonl", documents=_documents(config),
    )


def run(config: Config) -> None:
    """Export, and prove it by reading it back. An export of the same weights and options is only verified again."""
    if distributed.rank() != 0:
        return
    request = request_for(config, load_run(config))
    folder = Path(request.origin.folder)
    if config.export.verify and is_complete(folder, fingerprint(request)):
        reverify(folder, request.target, request.drafter, request.documents)
    else:
        export_drafter(request)
    if config.export.push_to_hub:
        push(folder, config.export.push_to_hub, private=config.export.hub_private)
