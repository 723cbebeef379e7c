"""What an evaluation found per prompt and per anchor, beside evaluation.json, so that runs can be compared in pairs."""

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional

import numpy as np
from numpy.typing import NDArray

from deepspec import artifacts
from deepspec.errors import InputRefused
from deepspec.evaluation.analytic import AnchorValues
from deepspec.evaluation.metrics import AcceptanceCounts

DIRECTORY, FILE = "evaluation", "values.npz"
PRODUCER = "evaluate_drafter"
_ANCHORS = ("sample", "position", "weight", "length")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class SettingValues:
    """One setting: counts per benchmark, and anchors (arrays [N] of sample, position, weight, length) if it has any.

    ``text`` tells what was read: equal only where the anchors of two evaluations are those of the same tokens.
    """

    counts: Mapping[str, AcceptanceCounts]
    anchors: Arrays = field(default_factory=dict)
    text: Optional[str] = None

    @property
    def pooled(self) -> AcceptanceCounts:
        """All prompts of all benchmarks."""
        return AcceptanceCounts.concatenate(self.counts.values())


def anchor_arrays(values: AnchorValues) -> Arrays:
    """The part of ``values`` that is kept."""
    return {"sample": values.sample, "position": values.position, "weight": values.weight.astype(np.float32),
            "length": values.lengths.astype(np.float32)}


def save_values(run_dir: Path, settings: Mapping[str, SettingValues], *, drafter_sha256: str, target_sha256: str,
                seed: int) -> None:
    """Write ``evaluation/values.npz`` and its manifest."""
    arrays: dict[str, Any] = {}  # keyword arguments
    index: dict[str, Any] = {}
    for number, (name, values) in enumerate(settings.items()):
        index[name] = {"benchmarks": list(values.counts), "text": values.text, "anchors": bool(values.anchors)}
        for place, counts in enumerate(values.counts.values()):
            arrays |= {f"{number}.{place}.{key}": part for key, part in vars(counts).items()}
        arrays |= {f"{number}.anchors.{key}": part for key, part in values.anchors.items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, settings=np.array(json.dumps(index)), **arrays)
    directory = Path(run_dir) / DIRECTORY
    manifest = artifacts.begin(
        directory, PRODUCER, artifacts.canonical_hash({"drafter": drafter_sha256, "settings": index, "seed": seed}),
        inputs={"drafter": drafter_sha256, "target": target_sha256}, seed=seed)
    artifacts.atomic_write_bytes(directory / FILE, buffer.getvalue())
    artifacts.complete(directory, manifest, [FILE], {"settings": list(index)})


def load_values(run_dir: Path) -> dict[str, SettingValues]:
    """Values by setting; empty where the run has none. Raises InputRefused for a file that cannot be read."""
    path = Path(run_dir) / DIRECTORY / FILE
    if not artifacts.is_complete(path.parent) or not path.is_file():
        return {}
    found: dict[str, SettingValues] = {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            index = json.loads(str(stored["settings"]))
            for number, (name, about) in enumerate(index.items()):
                counts = {
                    benchmark: AcceptanceCounts(**{key: stored[f"{number}.{place}.{key}"]
                                                   for key in AcceptanceCounts.__dataclass_fields__})
                    for place, benchmark in enumerate(about["benchmarks"])
                }
                anchors = {key: stored[f"{number}.anchors.{key}"] for key in _ANCHORS} if about["anchors"] else {}
                found[name] = SettingValues(counts, anchors, about["text"])
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InputRefused(f"{path} is not a file of evaluation values ({error}). Make it again with "
                           "launch/evaluate_drafter.py.") from None
    return found


def paired_counts(first: SettingValues, second: SettingValues) -> Optional[tuple[AcceptanceCounts, AcceptanceCounts]]:
    """Counts of the prompts both settings have, in the same order; None with fewer than two or other texts.

    Expectations are of given texts: only where both evaluations read the same tokens do they make pairs.
    """
    if first.text != second.text:
        return None
    parts: tuple[list[AcceptanceCounts], list[AcceptanceCounts]] = ([], [])
    for name, counts in first.counts.items():
        other = second.counts.get(name)
        if other is None:
            continue
        _, rows, columns = np.intersect1d(counts.prompts, other.prompts, return_indices=True)
        parts[0].append(counts.select(rows))
        parts[1].append(other.select(columns))
    if not parts[0]:
        return None
    widths = {part.reached.shape[1] for side in parts for part in side}
    pair = tuple(AcceptanceCounts.concatenate([part.positions(max(widths)) for part in side]) for side in parts)
    used = (pair[0].rounds > 0) & (pair[1].rounds > 0)
    pair = (pair[0].select(used), pair[1].select(used))
    return pair if len(pair[0]) > 1 else None
