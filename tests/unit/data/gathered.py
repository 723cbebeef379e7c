"""Prompts collected into a folder of their own and read back."""

import json
import tempfile
from pathlib import Path
from typing import Any, Sequence

from deepspec.config.schema import DataConfig, SourceConfig
from deepspec.data.collect import collect
from deepspec.data.decontaminate import BenchmarkFile
from deepspec.data.prompts import PromptRow, read_prompts
from deepspec.data.totals import SourceCounts, Totals


def write(path: Path, *rows: dict[str, Any]) -> Path:
    """Rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def source(path: object, **options: Any) -> SourceConfig:
    """A JSONL source named ``own``."""
    return SourceConfig(**({"name": "own", "kind": "jsonl", "path": str(path)} | options))


def gather_all(sources: Sequence[SourceConfig], folder: Path, benchmarks: Sequence[BenchmarkFile] = (),
               **options: Any) -> tuple[list[PromptRow], Totals]:
    """Rows and totals; outputs stay in ``folder``."""
    totals = collect(DataConfig(sources=list(sources), **options), 0, folder, benchmarks)
    return list(read_prompts(folder)), totals


def gather(*sources: SourceConfig, **options: Any) -> tuple[list[PromptRow], dict[str, SourceCounts]]:
    """Rows and counts, near duplicates kept unless asked otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        rows, totals = gather_all(sources, Path(folder), **({"near_duplicate_threshold": None} | options))
    return rows, totals.sources
