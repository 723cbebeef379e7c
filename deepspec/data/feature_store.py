"""Feature store: hidden states on disk, compressed, checksummed, resumable.

A store is a folder of shards. ``shard-RRRRR-SSSSS.bin`` holds records back to back (feature_codec.layout);
``shard-RRRRR-SSSSS.json`` lists them with a checksum each and the SHA-256 of the whole, and is written last: a shard
exists once its list does. ``index.jsonl`` joins the lists in sample order when everything is there.

``python -m deepspec.data.features`` looks at stores, checks and repairs them, and imports the caches of other projects.
"""

import mmap
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, Optional, Sequence

import numpy as np
import torch

from deepspec import artifacts
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample
from deepspec.data.encoded import StoredSample
from deepspec.data.feature_format import COMMAND, INDEX, Record, read_header, record_from_json
from deepspec.data.feature_records import decode_record, is_intact, record_size, stored_record
from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused

REPAIR = "python -m deepspec.data.features repair"
_OPEN_SHARDS = 64


class FeatureStore:
    """Reads a finished store through memory maps. Safe to use from several threads that each own one."""

    def __init__(self, directory: Path, split: Optional[str] = None) -> None:
        self.directory = Path(directory)
        self.manifest, self.header = read_header(self.directory)
        self._check_index()
        self.records = [
            record_from_json(row) for _, row in read_rows(self.directory / INDEX) if split in (None, row["split"])
        ]
        self._maps: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()  # of the maps: read_ahead has a thread of its own
        self._reader: Optional[ThreadPoolExecutor] = None
        for name in {record.shard for record in self.records}:
            self._check_size(name)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int, dtype: Optional[torch.dtype] = None) -> FeatureSample:
        """One sample in ``dtype`` (default: as stored; scaled codecs: float32).

        Rows of last_hidden nobody needs are zero. What is stored in ``dtype`` already is a view of the file: copy it
        before writing to it.
        """
        return decode_record(self.header, self.records[index], self._checked(index), dtype)

    def read_ahead(self, indices: Sequence[int], dtype: Optional[torch.dtype] = None) -> list[FeatureSample]:
        """``read`` of each index, while a thread brings the next ones into memory and checks them."""
        return [item.decoded() for item in self._ahead(indices, dtype)]

    def read_stored(self, indices: Sequence[int], dtype: Optional[torch.dtype] = None) -> list[StoredSample]:
        """The same as views of the file, to be decoded to ``dtype`` where they are needed (``lossless`` is unpacked
        to bfloat16)."""
        return list(self._ahead(indices, dtype))

    def _ahead(self, indices: Sequence[int], dtype: Optional[torch.dtype]) -> Iterator[StoredSample]:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="features")
        checked = [self._reader.submit(self._checked, index) for index in indices]
        for index, raw in zip(indices, checked):
            yield stored_record(self.header, self.records[index], raw.result(), dtype)

    def _checked(self, index: int) -> np.ndarray:
        """The bytes of a sample, as they were written."""
        record = self.records[index]
        raw = self._raw(record, record_size(self.header, record))
        if not is_intact(self.header, record, raw):
            raise self._damaged(record.shard, f"checksum of sample {record.sample_id!r} differs")
        return raw

    def loss_mask(self, index: int) -> torch.Tensor:
        """[T] bool of one sample, without its hidden states: one page of the shard instead of megabytes.

        The checksum covers the whole record, so here only the number of labels tells a damaged mask.
        """
        record = self.records[index]
        section = self.header.layout(record.tokens, record.label_rows, record.coded).mask
        raw = self._raw(record, section.offset + section.size)
        mask = torch.from_numpy(raw[section.offset:].astype(bool))
        if len(mask) != record.tokens or len(valid_anchors(mask)) != record.label_rows:
            raise self._damaged(record.shard, f"loss mask of sample {record.sample_id!r} differs from the index")
        return mask

    def _raw(self, record: Record, size: int) -> np.ndarray:
        """The first ``size`` bytes of a record [uint8], a view of the map."""
        with self._lock:
            return self._map(record.shard)[record.offset:record.offset + size]

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._check_size(name)
            with open(self.directory / f"{name}.bin", "rb") as handle:
                # Copy on write: whoever writes to a view by mistake changes no file (and the next checksum tells).
                mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[name] = np.frombuffer(mapped, dtype=np.uint8)
            if len(self._maps) > _OPEN_SHARDS:
                self._maps.popitem(last=False)
        self._maps.move_to_end(name)
        return self._maps[name]

    def _check_index(self) -> None:
        expected = self.manifest.files.get(INDEX)
        path = self.directory / INDEX
        if not path.exists() or artifacts.sha256_file(path) != expected:
            raise self._damaged(INDEX, "missing or changed since it was written")

    def _check_size(self, name: str) -> None:
        expected = self.manifest.facts["shards"].get(name, {}).get("bytes")
        path = self.directory / f"{name}.bin"
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            raise self._damaged(name, f"{'missing' if size is None else f'{size} bytes'}, expected {expected} bytes")

    def _damaged(self, name: str, why: str) -> InputRefused:
        file = name if name == INDEX else f"{name}.bin"
        return InputRefused(
            f"{self.directory / file}: {why}. Repair: {REPAIR} {self.directory}, which makes again only what is "
            f"damaged (with --remove: drops it, for {COMMAND} to make)."
        )
