"""Writes an export under a temporary name, proves it, and only then gives the folder its final name."""

import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from torch import Tensor

from deepspec.artifacts import (
    MANIFEST, Manifest, atomic_write_bytes, atomic_write_json, begin, canonical_hash, complete, fsync_directory,
    read_manifest, sha256_file,
)
from deepspec.config.schema import Config
from deepspec.drafters.base import Drafter
from deepspec.errors import InputRefused
from deepspec.export import bundle, tensors
from deepspec.export.card import card
from deepspec.export.checks import CheckResult
from deepspec.export.config_file import ConfigFacts, config_values, serving_shape
from deepspec.export.evidence import Evidence
from deepspec.export.fold import config_entry
from deepspec.export.formats import FormatContext, converter
from deepspec.export.launch import Origin
from deepspec.export.verify import refuse_failures, verify_folder

logger = logging.getLogger(__name__)
PRODUCER = "export"


@dataclass(frozen=True)
class ExportRequest:
    """Everything one export is made of. ``drafter`` holds the final weights (confidence head refitted or not)."""

    config: Config
    target: Any  # FrozenTarget
    drafter: Drafter
    origin: Origin
    evidence: Evidence
    records: Path  # the profile's raw cells; need not exist
    documents: Sequence[Tensor] = ()  # held-out samples [T] for the shift gate; none skips it
    shard_bytes: int = tensors.SHARD_BYTES


def _write_files(folder: Path, request: ExportRequest, values: Mapping[str, Any],
                 weights: Mapping[str, Tensor]) -> list[str]:
    """All files of an export but its manifest; returns their names relative to ``folder``."""
    spec, config = request.target.spec, request.config
    names = tensors.write(folder, weights, request.shard_bytes)
    atomic_write_json(folder / "config.json", values)
    names += ["config.json"]
    names += bundle.write_bundle(folder, values, spec, request.origin, request.evidence, request.records)
    serving = [Path(name).name for name in names if name.startswith(bundle.SERVING)]
    text = card(values, spec, config, request.origin, request.evidence, serving)
    atomic_write_bytes(folder / "README.md", text.encode())
    names += ["README.md"]
    context = FormatContext(request.origin.target, request.origin.target_architectures)
    for name in config.export.formats:
        if name != "deepspec":
            converted, own = converter(name)(values, weights, context)
            (folder / name).mkdir()
            atomic_write_json(folder / name / "config.json", converted)
            files = tensors.write(folder / name, own, request.shard_bytes)
            names += [f"{name}/{file}" for file in (*files, "config.json")]
    return names


def export_values(request: ExportRequest) -> dict[str, Any]:
    """config.json of ``request``."""
    config = request.config
    facts = ConfigFacts(config.export.dtype, config.trainer.num_anchors, config.data.max_length,
                        getattr(request.target.tokenizer, "pad_token_id", None))
    return config_values(request.drafter.shape, request.target.spec, facts) | config_entry(request.evidence)


def fingerprint(request: ExportRequest) -> str:
    """Hash of everything that decides an export's content, the place it stands at aside."""
    origin, evidence = asdict(request.origin), asdict(request.evidence)
    confidence = {name: tensors.digest(value) for name, value in request.drafter.named_parameters()
                  if name.startswith("confidence_head")}  # a refit changes it, the checkpoint's hash stays
    origin.pop("folder")
    return canonical_hash({"config.json": export_values(request), "origin": origin, "evidence": evidence,
                           "confidence": confidence, "formats": list(request.config.export.formats)})


def export_drafter(request: ExportRequest) -> Path:
    """Write and prove ``request.origin.folder``; an older export there is replaced only when the new one has passed.

    Raises InputRefused listing every check that failed; the folder at the final place is then untouched.
    """
    final = Path(request.origin.folder)
    work = final.with_name(f".{final.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    config, drafter = request.config, request.drafter
    values = export_values(request)
    dtype = tensors.DTYPES[config.export.dtype]
    weights = tensors.collect(drafter, serving_shape(drafter.shape), drafter.shared, dtype)
    inputs = {"target": request.origin.target_fingerprint, "drafter": request.origin.drafter_sha256}
    manifest = begin(work, PRODUCER, fingerprint(request), inputs=inputs, config=asdict(config), seed=config.run.seed)
    try:
        names = _write_files(work, request, values, weights)
        results, found = verify_folder(work, request.target, request.drafter, request.documents)
        refuse_failures(results, final)
        _finish(work, manifest, names, results, found, request.evidence)
        _replace(work, final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for name, reason in sorted(request.evidence.absent.items()):
        logger.warning("exported without %s: %s", name, reason)
    logger.info("exported to %s: %d files, %d checks passed", final, len(names), len(results))
    return final


def _finish(work: Path, manifest: Manifest, names: Sequence[str], results: Sequence[CheckResult],
            found: Mapping[str, Any], evidence: Evidence) -> None:
    checks = {str(result.number): {"name": result.name, "passed": result.passed, "detail": result.detail}
              for result in results}
    complete(work, manifest, names, {"checks": checks, "absent": dict(evidence.absent), **found})


def _replace(work: Path, final: Path) -> None:
    """Swap the proved folder in. The older export survives until the new one has its name."""
    older: Optional[Path] = None
    if final.exists():
        older = final.with_name(f".{final.name}.old")
        shutil.rmtree(older, ignore_errors=True)
        os.rename(final, older)
    os.rename(work, final)
    fsync_directory(final.parent)
    if older is not None:
        shutil.rmtree(older, ignore_errors=True)


def reverify(folder: Path, target: Any, drafter: Drafter, documents: Sequence[Tensor] = ()) -> None:
    """Run the checks again on an existing export (``export.verify=true``); its manifest records the outcome.

    Raises InputRefused listing what fails, also for a file that is not what the export wrote.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.status != "complete":
        raise InputRefused(f"{folder} has no complete {MANIFEST}: it is not a finished export. Export again.")
    changed = [name for name, digest in manifest.files.items()
               if not (folder / name).is_file() or sha256_file(folder / name) != digest]
    if changed:
        raise InputRefused(f"{folder}: not what the export wrote: {', '.join(changed[:5])}. Restore the file, or "
                           "delete the folder and export again.")
    results, _ = verify_folder(folder, target, drafter, documents)
    refuse_failures(results, folder)
    logger.info("%s: %d checks passed", folder, len(results))
