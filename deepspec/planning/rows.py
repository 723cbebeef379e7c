"""How many rows local prompt files have, for the plan: counted, or of large files estimated from their beginning."""

from pathlib import Path
from typing import NamedTuple, Optional

from deepspec.config.schema import SourceConfig
from deepspec.data.prompt_sources import source_paths

COUNTED_BYTES = 256 * 2**20  # of all files of a source; larger ones are estimated
SAMPLE_BYTES = 2**20


class RowCount(NamedTuple):
    """Rows, and whether they were counted."""

    rows: int
    exact: bool

    @property
    def text(self) -> str:
        """For the plan's table."""
        return f"{self.rows:,}" if self.exact else f"about {self.rows:,}"


def _count_lines(path: Path) -> int:
    """Lines that are not blank; the last one need not end in a newline."""
    with open(path, "rb") as handle:
        return sum(1 for line in handle if line.strip())


def _estimate_lines(path: Path) -> int:
    """Lines of the first megabyte, scaled to the whole file."""
    with open(path, "rb") as handle:
        start = handle.read(SAMPLE_BYTES)
    return round(path.stat().st_size / len(start) * max(start.count(b"\n"), 1)) if start else 0


def _parquet_rows(path: Path) -> int:
    from pyarrow import parquet

    return int(parquet.read_metadata(path).num_rows)


def source_rows(source: SourceConfig) -> Optional[RowCount]:
    """Rows of the files of ``source``; None where it reads no local files, or they are missing or unreadable."""
    try:
        found = source_paths(source)
        if not found:
            return None
        if source.kind == "parquet":
            return RowCount(sum(map(_parquet_rows, found)), True)
        exact = sum(path.stat().st_size for path in found) <= COUNTED_BYTES
        return RowCount(sum(map(_count_lines if exact else _estimate_lines, found)), exact)
    except (ImportError, OSError, RuntimeError, ValueError):  # RuntimeError: ~ of a user who is not there
        return None


def most_prompts(sources: list[SourceConfig]) -> Optional[tuple[RowCount, bool]]:
    """The most prompts that ``sources`` can give together, their caps included, and whether caps alone decide it; None
    where one does not say."""
    counts, by_caps = [], True
    for source in sources:
        count = source_rows(source)
        if source.cap is not None and (count is None or source.cap <= count.rows):
            count = RowCount(source.cap, True)
        elif count is None:
            return None
        else:
            by_caps = False
        counts.append(count)
    if not counts:
        return None
    return RowCount(sum(count.rows for count in counts), all(count.exact for count in counts)), by_caps
