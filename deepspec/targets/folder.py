"""Checks of a Hugging Face folder before any weight is read: every shard is there, whole, and has what it promises."""

import json
from pathlib import Path
from typing import Any

from deepspec.errors import InputRefused

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000  # bytes, the format's own limit


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputRefused(f"{path} is not readable as JSON ({error}). Download the model again.") from None


def safetensors_keys(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file. Raises InputRefused when the file is cut or not of that format."""
    size = path.stat().st_size
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = handle.read(length) if length <= min(_HEADER_LIMIT, size) else b""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputRefused(f"{path} is not a whole safetensors file: its header cannot be read ({size} bytes). "
                           "Download it again.") from None
    if size != needed:
        raise InputRefused(f"{path} is truncated or damaged: it has {size} bytes, its header describes {needed}. "
                           "Download it again.")
    return set(entries)


def check_folder(folder: Path) -> None:
    """Raise InputRefused, naming the file and the key, unless ``folder`` holds a complete model.

    Accepts one ``model.safetensors`` or an index with shards; reads headers only.
    """
    if not (folder / "config.json").is_file():
        raise InputRefused(f"{folder} has no config.json, so it is not a Hugging Face model folder. "
                           "Point target.path at the folder that save_pretrained wrote.")
    _read_json(folder / "config.json")
    index = folder / INDEX
    if index.is_file():
        _check_shards(folder, index)
    elif (folder / SINGLE).is_file():
        safetensors_keys(folder / SINGLE)
    else:
        raise InputRefused(f"{folder} has neither {SINGLE} nor {INDEX}: there are no weights to load. Download the "
                           "model again; a model with pickled weights (*.bin) must be saved as safetensors first.")


def _check_shards(folder: Path, index: Path) -> None:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputRefused(f"{index} has no weight_map. Download the model again.")
    present: dict[str, set[str]] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            keys = sorted(key for key, file in weight_map.items() if file == name)
            raise InputRefused(f"{folder / name} is missing, though {INDEX} lists it for {len(keys)} tensors, the "
                               f"first being {keys[0]!r}. Download that shard again.")
        present[name] = safetensors_keys(folder / name)
    for key, name in sorted(weight_map.items()):
        if key not in present[name]:
            raise InputRefused(f"{index} says that tensor {key!r} is in {name}, but that file does not contain it. "
                               "Download the model again.")
