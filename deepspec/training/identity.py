"""What a run means. A resume that would silently continue as another run is refused by the names of what differs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Mapping, Optional

from deepspec.artifacts import canonical_hash, sha256_file
from deepspec.config.schema import Config, training_seed
from deepspec.drafters.types import DrafterShape
from deepspec.errors import InputRefused

# How the loss is computed, not what it is.
_NOT_MEANING = {"implementation", "chunk_megabytes"}
# Not in the oldest checkpoints, which are taken at their word.
_LATER = {"start.warm_start", "start.init_from", "trainer.ema_decay"}
# What the oldest checkpoints were trained with, when there was no choice.
_BEFORE = {"drafter.block": "qwen3", "drafter.keys_are_values": False, "drafter.draft_ids": None,
           "optimizer.schedule": "cosine", "optimizer.decay_ratio": None}


def run_identity(config: Config, shape: DrafterShape, *, target: str, data: str) -> dict[str, Any]:
    """Flat, JSON-able: everything that decides the weights except where and how fast they are computed.

    ``target`` and ``data`` are fingerprints. World size, ZeRO stage, micro-batch and the number of steps are free.
    """
    objective = {key: value for key, value in asdict(config.objective).items() if key not in _NOT_MEANING}
    trainer = {key: getattr(config.trainer, key)
               for key in ("global_batch_size", "num_anchors", "precision", "ema_decay")}
    values: dict[str, Any] = {"target_fingerprint": target, "data_fingerprint": data, "seed": training_seed(config)}
    values |= {"start.warm_start": config.drafter.warm_start, "start.init_from": start_hash(config.drafter.init_from)}
    if shape.v4 is not None:
        values["drafter.router_bias_rate"] = config.drafter.v4.router_bias_rate
    for prefix, part in (("drafter", asdict(shape)), ("objective", objective), ("trainer", trainer),
                         ("optimizer", asdict(config.optimizer))):
        values |= {f"{prefix}.{key}": _plain(value) for key, value in part.items()}
    return values


def start_hash(folder: Optional[str]) -> Optional[str]:
    """The weights in ``drafter.init_from`` by their content; None without that folder."""
    if folder is None:
        return None
    return canonical_hash([sha256_file(path) for path in sorted(Path(folder).glob("*.safetensors"))])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def shown(value: Any) -> str:
    """A value for a message: a long list by its length and beginning."""
    if isinstance(value, (list, tuple)) and len(value) > 16:
        return f"{len(value)} values that begin {list(value[:4])}"
    return repr(value)


def require_same(saved: Mapping[str, Any], current: Mapping[str, Any], checkpoint: Path) -> None:
    """Raises InputRefused naming every key whose value differs, with both values."""
    saved = _BEFORE | dict(saved)
    current = _BEFORE | dict(current)
    different = [
        f"{key}: {shown(saved.get(key))} in the checkpoint, {shown(current.get(key))} now"
        for key in sorted(saved.keys() | current.keys() - (_LATER - saved.keys())) if saved.get(key) != current.get(key)
    ]
    if different:
        raise InputRefused(
            f"{checkpoint} belongs to another run: {'; '.join(different)}. Set these options back, start another run "
            "(run.name=NAME), or start this one over with trainer.resume=never."
        )
