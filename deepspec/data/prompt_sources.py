"""Raw rows of the configured prompt sources, each with the place it came from. No column types are inferred."""

import logging
from pathlib import Path
from typing import Any, Iterator, Optional

from deepspec.config.schema import SourceConfig
from deepspec.data.embedded import KINDS, embedded_prompts
from deepspec.data.jsonl import read_nonempty
from deepspec.errors import ConfigError, InputRefused

log = logging.getLogger(__name__)

Located = tuple[str, dict[str, Any]]  # ("file:line" or the like, row)


def read_source(source: SourceConfig, *, limit: Optional[int], seed: int) -> Iterator[Located]:
    """Rows of one source. ``limit`` bounds only sources that are made here; files are read whole, so that which rows
    are chosen does not depend on their order. Raises ConfigError or InputRefused."""
    if source.kind == "embedded":
        if source.path not in KINDS:
            raise ConfigError(f"Source {source.name!r}: path={source.path!r} is not one of {', '.join(KINDS)}.")
        rows = embedded_prompts(source.path, limit, seed)
        return ((f"{source.name}[{index}]", row) for index, row in enumerate(rows))
    if source.kind == "jsonl":
        return _read_files(source, "*.jsonl", _read_jsonl)
    if source.kind == "parquet":
        return _read_files(source, "*.parquet", _read_parquet)
    if source.kind == "hf":
        return _read_hub(source)
    raise ConfigError(f"Source {source.name!r}: kind={source.kind!r} is not one of embedded, jsonl, parquet, hf.")


def _read_files(source: SourceConfig, pattern: str, read: Any) -> Iterator[Located]:
    path = Path(source.path).expanduser()
    if not source.path or not path.exists():
        raise InputRefused(f"Source {source.name!r}: path {source.path!r} does not exist. Correct its path.")
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    if not files:
        raise InputRefused(f"Source {source.name!r}: no {pattern} in {path}. Correct its path.")
    for file in files:
        yield from read(file)


def _read_jsonl(path: Path) -> Iterator[Located]:
    for number, row in read_nonempty(path, "prompts"):
        yield f"{path}:{number}", row


def _read_parquet(path: Path) -> Iterator[Located]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputRefused(f"{path} needs pyarrow. Install it with: pip install pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise InputRefused(f"{path}: not readable as Parquet after row {number} ({_first_line(error)}).") from None
    if not number:
        raise InputRefused(f"{path}: 0 prompts, expected one prompt per row. Give a file that has prompts.")


def _read_hub(source: SourceConfig) -> Iterator[Located]:
    try:
        import datasets
    except ImportError:
        raise InputRefused(f"Source {source.name!r} needs datasets. Install it with: pip install datasets") from None
    try:
        rows = datasets.load_dataset(
            source.path, source.config_name, split=source.split, revision=source.revision,
        )
    except Exception as error:  # the hub client raises its own types, those of its HTTP library, and builtin ones
        raise InputRefused(
            f"Source {source.name!r}: the dataset {source.path!r} (split {source.split!r}) could not be loaded "
            f"({_first_line(error)}). Check its name and the network; or download it elsewhere, save it as JSON Lines "
            f"or Parquet and use kind=jsonl or kind=parquet with its path."
        ) from None
    for number, row in enumerate(rows):
        yield f"{source.path}[{number}]", row


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0][:200]}" if lines[0] else type(error).__name__
