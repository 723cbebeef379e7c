"""Feature store v1: hidden states on disk, compressed, checksummed, resumable.

A store is a folder of shards. ``shard-RRRRR-SSSSS.bin`` holds records back to back (feature_codec.layout);
``shard-RRRRR-SSSSS.json`` lists them with a CRC each and the SHA-256 of the whole, and is written last: a shard
exists once its list does. ``index.jsonl`` joins the lists in sample order when everything is there.

    python -m deepspec.data.feature_store verify DIR     check every byte
    python -m deepspec.data.feature_store repair DIR     remove damaged shards, so that the next extraction redoes them
"""

import logging
import sys
import zlib
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Optional, Sequence

import numpy as np
import torch

from deepspec import artifacts
from deepspec.data import feature_codec as codecs
from deepspec.data import feature_shards
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.feature_format import COMMAND, INDEX, Record, StoreHeader, check_finite, read_header
from deepspec.data.feature_shards import FeatureWriter
from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused, UserError

__all__ = ["FeatureStore", "FeatureWriter", "StoreHeader"]
log = logging.getLogger(__name__)

_OPEN_SHARDS = 64


class FeatureStore:
    """Reads a finished store through memory maps. Safe to use from several threads that each own one."""

    def __init__(self, directory: Path, split: Optional[str] = None) -> None:
        self.directory = Path(directory)
        self.manifest, self.header = read_header(self.directory)
        self._check_index()
        self.records = [
            Record(**row) for _, row in read_rows(self.directory / INDEX) if split in (None, row["split"])
        ]
        self._maps: OrderedDict[str, np.ndarray] = OrderedDict()
        for name in {record.shard for record in self.records}:
            self._check_size(name)

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> FeatureSample:
        """One sample in the dtype it is stored in (int8: float32); rows of last_hidden nobody needs are zero."""
        record = self.records[index]
        layout = self.header.layout(record.tokens, record.label_rows)
        raw = np.array(self._map(record.shard)[record.offset:record.offset + layout.size])
        if len(raw) != layout.size or zlib.crc32(raw.data) != record.crc32:
            raise self._damaged(record.shard, f"checksum of sample {record.sample_id!r} differs")
        sample = Sample(
            sample_id=record.sample_id, domain=record.domain,
            input_ids=torch.from_numpy(_section(raw, layout.ids).view(np.int32).astype(np.int64)),
            loss_mask=torch.from_numpy(_section(raw, layout.mask).astype(bool)),
        )
        features, rows = self._decode(raw, record, layout)
        check_finite(self.header, record.sample_id, features, rows)
        last_hidden = torch.zeros(record.tokens, self.header.hidden_size, dtype=rows.dtype)
        last_hidden[valid_anchors(sample.loss_mask)] = rows
        return FeatureSample(sample, features, last_hidden)

    def loss_mask(self, index: int) -> torch.Tensor:
        """[T] bool of one sample, without its hidden states: one page of the shard instead of megabytes.

        The checksum covers the whole record, so here only the number of labels tells a damaged mask.
        """
        record = self.records[index]
        section = self.header.layout(record.tokens, record.label_rows).mask
        first = record.offset + section.offset
        mask = torch.from_numpy(np.array(self._map(record.shard)[first:first + section.size]).astype(bool))
        if len(mask) != record.tokens or len(valid_anchors(mask)) != record.label_rows:
            raise self._damaged(record.shard, f"loss mask of sample {record.sample_id!r} differs from the index")
        return mask

    def _decode(self, raw: np.ndarray, record: Record, layout: codecs.Layout) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, rows, layers, width = record.tokens, record.label_rows, len(self.header.layers), self.header.hidden_size
        codec, groups = self.header.codec, width // codecs.group_size(width) if self.header.codec == "int8" else 0
        features = codecs.decode(
            codecs.from_bytes(raw, layout.features, codec, (tokens, layers, width)),
            codecs.scales_from_bytes(raw, layout.feature_scales, (tokens, layers, groups)), codec,
        )
        hidden = codecs.decode(
            codecs.from_bytes(raw, layout.hidden, codec, (rows, width)),
            codecs.scales_from_bytes(raw, layout.hidden_scales, (rows, groups)), codec,
        )
        return features.flatten(1), hidden

    def _map(self, name: str) -> np.ndarray:
        if name not in self._maps:
            self._check_size(name)
            self._maps[name] = np.memmap(self.directory / f"{name}.bin", dtype=np.uint8, mode="r")
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
            f"{self.directory / file}: {why}. Repair: python -m deepspec.data.feature_store repair {self.directory} "
            f"and then {COMMAND}, which makes only what is missing."
        )


def _section(raw: np.ndarray, section: codecs.Section) -> np.ndarray:
    return raw[section.offset:section.offset + section.size]


def verify(directory: Path, *, remove: bool = False) -> list[str]:
    """Damaged shards of a finished or unfinished store, found by hashing every byte.

    ``remove`` deletes them and marks the store unfinished, so that the next extraction makes what is missing.
    """
    manifest = artifacts.read_manifest(directory)
    if manifest is None:
        raise InputRefused(f"{directory} is not a feature store: it has no {artifacts.MANIFEST}.")
    listed = set(manifest.facts.get("shards", {})) | set(feature_shards.shard_names(directory))
    damaged = []
    for name in sorted(listed):
        problem = feature_shards.shard_problem(directory, name)
        if problem:
            log.error("%s.bin: %s", Path(directory) / name, problem)
            damaged.append(name)
    if manifest.status == "complete":
        index = Path(directory) / INDEX
        if not index.exists() or artifacts.sha256_file(index) != manifest.files.get(INDEX):
            log.error("%s: missing or changed since it was written", index)
            damaged.append(INDEX)
    if remove and damaged:
        incomplete = asdict(manifest) | {"status": "incomplete", "files": {}}
        artifacts.atomic_write_json(Path(directory) / artifacts.MANIFEST, incomplete)
        for name in damaged:
            feature_shards.remove_shard(directory, name)
    return damaged


def main(arguments: Sequence[str]) -> int:
    """``verify DIR`` or ``repair DIR``; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if len(arguments) != 2 or arguments[0] not in ("verify", "repair"):
        log.error("usage: python -m deepspec.data.feature_store verify|repair DIR")
        return 2
    action, directory = arguments[0], Path(arguments[1])
    try:
        damaged = verify(directory, remove=action == "repair")
    except UserError as error:
        log.error("%s", error)
        return error.exit_code
    if not damaged:
        log.info("%s: every shard is as it was written", directory)
        return 0
    if action == "repair":
        log.info("%s: removed %s. Make them again with: %s", directory, ", ".join(damaged), COMMAND)
        return 0
    log.error("%s: %d damaged. Repair: python -m deepspec.data.feature_store repair %s", directory, len(damaged),
              directory)
    return InputRefused.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
