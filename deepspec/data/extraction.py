"""What extraction goes through, and what it sets aside."""

import logging
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from deepspec.data.batch import Sample
from deepspec.data.feature_format import BadFeatures
from deepspec.data.jsonl import DurableWriter
from deepspec.data.samples import SampleSet
from deepspec.data.sources import token_batches
from deepspec.errors import UserError

log = logging.getLogger(__name__)
# Share of samples without usable hidden states (NaN, overflow, refused by a server) before extraction stops.
QUARANTINE_LIMIT = 0.01


def allowed_aside(samples: int) -> int:
    """How many of ``samples`` may be set aside."""
    return max(1, int(QUARANTINE_LIMIT * samples))


@dataclass(frozen=True)
class Work:
    """All samples of both splits, addressed by one index."""

    sets: dict[str, SampleSet]

    def __len__(self) -> int:
        return sum(map(len, self.sets.values()))

    def get(self, index: int) -> tuple[str, Sample]:
        """(split, sample)."""
        for split, samples in self.sets.items():
            if index < len(samples):
                return split, samples[index]
            index -= len(samples)
        raise IndexError(index)

    @property
    def ids(self) -> list[str]:
        return list(chain.from_iterable(samples.sample_ids for samples in self.sets.values()))

    @property
    def lengths(self) -> list[int]:
        return list(chain.from_iterable(samples.lengths for samples in self.sets.values()))

    def batches(self, token_budget: int) -> list[list[int]]:
        """Indices of samples of similar length, longest first: the first batch needs the most memory."""
        lengths = self.lengths
        order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        return [[order[place] for place in batch] for batch in
                token_batches([lengths[index] for index in order], token_budget)]


class Quarantine:
    """Samples that are set aside, in a file of this rank."""

    def __init__(self, directory: Path, rank: int, samples: int) -> None:
        self._directory, self._allowed = directory, allowed_aside(samples)
        self._file = DurableWriter(directory / f"quarantine-{rank:05d}.jsonl")
        self.count = 0

    def __enter__(self) -> "Quarantine":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, sample_id: str, error: BadFeatures) -> None:
        """Raises UserError when there are too many."""
        self.count += 1
        log.error("features: set aside: %s", error)
        self._file.write({"sample_id": sample_id, "reason": str(error)})
        if self.count > self._allowed:
            raise UserError(f"{self.count} samples have unusable hidden states, at most {self._allowed} may; the last: "
                            f"{error} All are in {self._directory}/quarantine-*.jsonl") from None
