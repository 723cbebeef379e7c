"""Raw rows of the configured prompt sources, each with the place it came from. No column types are inferred."""

from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Union

from deepspec.config.schema import SourceConfig
from deepspec.data.embedded import KINDS, embedded_prompts
from deepspec.data.jsonl import BadValue, read_nonempty
from deepspec.data.prompt_rows import RowRefused
from deepspec.data.request_logs import unwrap_request
from deepspec.errors import ConfigError, InputRefused

Located = tuple[str, Union[dict[str, Any], RowRefused]]  # ("file:line" or the like, row or why there is none)
DEFAULT_EMBEDDED = 1000  # prompts of an embedded source that names no limit
FILE_KINDS = {"jsonl": "jsonl", "requests": "jsonl", "parquet": "parquet"}  # kind -> how its files' names end


def source_paths(source: SourceConfig) -> list[Path]:
    """The local files of a source, sorted; none for kinds that read no files and for a path that does not exist."""
    if source.kind not in FILE_KINDS or not source.path:
        return []
    path = Path(source.path).expanduser()
    if path.is_dir():
        return sorted(path.rglob(f"*.{FILE_KINDS[source.kind]}"))
    return [path] if path.exists() else []


def read_source(source: SourceConfig, *, limit: Optional[int], seed: int) -> Iterator[Located]:
    """Rows of one source. ``limit`` bounds only sources that are made here; files are read whole, so that which rows
    are chosen does not depend on their order. Raises ConfigError or InputRefused."""
    if source.kind == "embedded":
        if source.path not in KINDS:
            raise ConfigError(f"Source {source.name!r}: path={source.path!r} is not one of {', '.join(KINDS)}.")
        rows = embedded_prompts(source.path, limit, seed)
        return ((f"{source.name}[{index}]", row) for index, row in enumerate(rows))
    if source.kind == "jsonl":
        return _read_files(source, _read_jsonl)
    if source.kind == "requests":
        return (_unwrapped(where, row) for where, row in _read_files(source, _read_jsonl))
    if source.kind == "parquet":
        return _read_files(source, _read_parquet)
    if source.kind == "hf":
        return _read_hub(source)
    raise ConfigError(f"Source {source.name!r}: kind={source.kind!r} is not one of embedded, jsonl, requests, parquet, "
                      "hf.")


def _read_files(source: SourceConfig, read: Callable[[Path], Iterator[Located]]) -> Iterator[Located]:
    if not source.path or not Path(source.path).expanduser().exists():
        raise InputRefused(f"Source {source.name!r}: path {source.path!r} does not exist. Correct its path.")
    files = source_paths(source)
    if not files:
        ending = FILE_KINDS[source.kind]
        raise InputRefused(f"Source {source.name!r}: no *.{ending} in {source.path}. Correct its path.")
    for file in files:
        yield from read(file)


def _refused(_: int, error: BadValue) -> RowRefused:
    return RowRefused(error.reason)


def _read_jsonl(path: Path) -> Iterator[Located]:
    for number, row in read_nonempty(path, "prompts", bad_value=_refused):
        yield f"{path}:{number}", row


def _unwrapped(where: str, row: Union[dict[str, Any], RowRefused]) -> Located:
    try:
        return where, row if isinstance(row, RowRefused) else unwrap_request(row)
    except RowRefused as refusal:
        return where, refusal


def _without_nulls(value: Any) -> Any:
    """A row of a columnar file as it was before: Arrow gives every object the keys of all others, with nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


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
                    yield f"{path}:row {number}", _without_nulls(row)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path}: not readable as Parquet after row {number} ({_first_line(error)}).") from None
    if not number:
        raise InputRefused(f"{path}: 0 prompts, expected one prompt per row. Give a file that has prompts.")


def _read_hub(source: SourceConfig) -> Iterator[Located]:
    try:
        import datasets
    except ImportError:
        raise InputRefused(f"Source {source.name!r} needs datasets. Install it with: pip install datasets") from None
    folder = Path(source.path).expanduser()
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(folder))  # written by save_to_disk
            rows = rows[source.split] if isinstance(rows, dict) else rows
        else:
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
        yield f"{source.path}[{number}]", _without_nulls(row)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0][:200]}" if lines[0] else type(error).__name__
