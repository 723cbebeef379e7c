"""What became of the rows of every source: counts, as JSON and as a table."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Sequence

from deepspec.data.prompts import SPLITS


@dataclass
class SourceCounts:
    """``read`` = ``kept`` + all of ``refused`` + all of ``unused``."""

    read: int = 0
    valid: int = 0  # could be used: what caps and the mixture choose from
    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    unused: Counter[str] = field(default_factory=Counter)  # valid rows over the cap or over the source's share
    splits: Counter[str] = field(default_factory=Counter)  # kept rows

    def __str__(self) -> str:
        reasons = "".join(f", {reason} {count}" for reason, count in sorted((self.refused + self.unused).items()))
        return f"read {self.read}, valid {self.valid}, kept {self.kept}{reasons}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``dropped`` has every reason."""
        dropped = dict(sorted((self.refused + self.unused).items()))
        splits = {split: self.splits[split] for split in SPLITS}
        return {"read": self.read, "valid": self.valid, "kept": self.kept, **splits, "dropped": dropped}


@dataclass
class Totals:
    """The result of collecting."""

    sources: dict[str, SourceCounts]
    domains: dict[str, Counter[str]] = field(default_factory=dict)  # domain -> split -> rows
    near_duplicates: dict[str, Any] = field(default_factory=dict)
    decontamination: dict[str, Any] = field(default_factory=dict)

    def everything(self) -> SourceCounts:
        """All sources together."""
        whole = SourceCounts()
        for counts in self.sources.values():
            whole.read, whole.valid, whole.kept = (
                whole.read + counts.read, whole.valid + counts.valid, whole.kept + counts.kept,
            )
            whole.refused += counts.refused
            whole.unused += counts.unused
            whole.splits += counts.splits
        return whole

    def to_json(self) -> dict[str, Any]:
        """The content of totals.json."""
        removed = {name: facts["removed"] for name, facts in self.decontamination.get("benchmarks", {}).items()}
        return {
            "schema_version": 1, "total": self.everything().to_json(),
            "sources": {name: counts.to_json() for name, counts in self.sources.items()},
            "domains": {name: {split: counts[split] for split in SPLITS} for name, counts in
                        sorted(self.domains.items())},
            "near_duplicates": self.near_duplicates, "benchmarks": removed,
        }

    def table(self) -> str:
        """One line per source and one for all, a column per reason that occurred."""
        rows = {**self.sources, "total": self.everything()}
        reasons = sorted(rows["total"].refused + rows["total"].unused)
        header = ["source", "read", "kept", *SPLITS, *reasons]
        lines = [[name, counts.read, counts.kept, *(counts.splits[split] for split in SPLITS),
                  *((counts.refused + counts.unused)[reason] for reason in reasons)] for name, counts in rows.items()]
        return _aligned([header, *lines])


def _aligned(rows: Sequence[Sequence[Any]]) -> str:
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                               for column, (cell, width) in enumerate(zip(row, widths))) for row in cells)
