"""Caches of DeepSpec (version 2): ``manifest.json``, ``samples.idx`` and ``shard-*.bin``.

A record of the index is little-endian: sample id u64, shard u32, tokens u32, then u64 offsets within the shard of token
ids (int32), attention mask (uint8), loss mask (uint8), hidden states [T, M*D] and last hidden states [T, D] (bfloat16).
Layer ids are ours, except that -1 there means the embedding. Last hidden states are after the final norm.
"""

import hashlib
import json
import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspec.data.batch import FeatureSample
from deepspec.data.features.cache import check_rows, make_sample
from deepspec.errors import InputRefused

_RECORD = struct.Struct("<QIIQQQQQ")
_VERSION = 2
_DTYPES = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}


class DeepSpecCache:
    """Reads the cache through memory maps."""

    def __init__(self, directory: Path, domain: str) -> None:
        self.directory, self._domain = directory, domain
        manifest = _manifest(directory)
        self.layers = tuple(int(layer) for layer in manifest["target_layer_ids"])
        if any(layer < 0 for layer in self.layers):
            raise InputRefused(f"{directory}: layers {list(self.layers)} include the embedding (-1), which has no "
                               "counterpart here.")
        self.hidden_size, self.dtype = int(manifest["hidden_size"]), "bfloat16"
        self._shards = [directory / shard["file_name"]
                        for shard in sorted(manifest["shards"], key=lambda shard: int(shard["shard_id"]))]
        index = directory / "samples.idx"
        self._index = index.read_bytes() if index.exists() else b""
        if len(self._index) != int(manifest["num_samples"]) * _RECORD.size:
            raise InputRefused(f"{index}: {len(self._index)} bytes, expected {manifest['num_samples']} records of "
                               f"{_RECORD.size}.")
        for path in self._shards:
            if not path.exists():
                raise InputRefused(f"{path}: missing, but the manifest lists it.")
        self.stored_bytes = sum(path.stat().st_size for path in self._shards)
        self.fingerprint = hashlib.sha256((directory / "manifest.json").read_bytes() + self._index).hexdigest()
        self._map = lru_cache(maxsize=16)(_map)

    def __len__(self) -> int:
        return len(self._index) // _RECORD.size

    def sample_id(self, index: int) -> str:
        """Position in the cache."""
        return f"deepspec-{index:08d}"

    def read(self, index: int) -> FeatureSample:
        """Views of the shard. Raises InputRefused for a record that its shard does not hold."""
        number, shard, tokens, ids, _, mask, hidden, last = _RECORD.unpack_from(self._index, index * _RECORD.size)
        where = f"{self.directory}/samples.idx record {index}"
        if number != index or shard >= len(self._shards):
            raise InputRefused(f"{where}: sample {number} in shard {shard}; expected sample {index} in one of "
                               f"{len(self._shards)} shards.")
        raw = self._map(self._shards[shard])

        def view(offset: int, count: int, dtype: torch.dtype) -> Tensor:
            size = count * dtype.itemsize
            if offset + size > len(raw):
                raise InputRefused(f"{where}: bytes {offset} to {offset + size} of {self._shards[shard]}, which has "
                                   f"{len(raw)}.")
            # A copy: nothing there is aligned.
            return torch.from_numpy(raw[offset:offset + size].copy()).view(dtype)

        sample = make_sample(where, self.sample_id(index), self._domain, view(ids, tokens, torch.int32),
                             view(mask, tokens, torch.uint8))
        width, layers = self.hidden_size, len(self.layers)
        features = view(hidden, tokens * layers * width, torch.bfloat16).view(tokens, -1)
        return check_rows(where, sample, features, view(last, tokens * width, torch.bfloat16).view(tokens, -1), layers)


def _map(path: Path) -> np.ndarray:
    with open(path, "rb") as handle:
        return np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found = {"version": manifest["version"], "index_record_size": manifest["index_record_size"],
                 **{name: manifest[name] for name in _DTYPES}}
        missing = {"target_layer_ids", "hidden_size", "num_samples", "shards"} - manifest.keys()
        if missing:
            raise KeyError(", ".join(sorted(missing)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InputRefused(f"{path} is not the manifest of a DeepSpec cache ({what}).") from None
    expected = {"version": _VERSION, "index_record_size": _RECORD.size, **_DTYPES}
    for name, value in expected.items():
        if found[name] != value:
            raise InputRefused(f"{path}: {name} is {found[name]!r}; only {value!r} can be imported.")
    return manifest
