"""Shards of a feature store: written whole or not at all, found again after a kill, joined into one index."""

import errno
import hashlib
import json
import logging
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Optional, Sequence

import numpy as np
from torch import Tensor

from deepspec import artifacts
from deepspec.data import feature_codec as codecs
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import Sample
from deepspec.data.feature_format import COMMAND, INDEX, BadFeatures, Record, StoreHeader, check_finite, human_bytes
from deepspec.data.jsonl import dump_row
from deepspec.errors import UserError

log = logging.getLogger(__name__)


def shard_names(directory: os.PathLike | str) -> list[str]:
    """Names (without suffix) of the shards whose list is there."""
    return sorted(path.stem for path in Path(directory).glob("shard-*.json"))


def read_shard(directory: os.PathLike | str, name: str) -> dict[str, Any]:
    """The list of a shard: header, bytes, sha256, records. Raises ValueError if it cannot be read."""
    with open(Path(directory) / f"{name}.json", encoding="utf-8") as handle:
        values = json.load(handle)
    if not {"header", "bytes", "sha256", "records"} <= values.keys():
        raise ValueError(f"{name}.json lacks fields")
    return values


def shard_problem(directory: os.PathLike | str, name: str) -> Optional[str]:
    """What is wrong with a shard, None if every byte is as written. Reads the whole shard."""
    path = Path(directory) / f"{name}.bin"
    try:
        values = read_shard(directory, name)
    except (OSError, ValueError) as error:
        return f"its list cannot be read ({error})"
    if not path.exists():
        return "missing"
    if path.stat().st_size != values["bytes"]:
        return f"{path.stat().st_size} bytes, expected {values['bytes']}"
    return None if artifacts.sha256_file(path) == values["sha256"] else "SHA-256 differs"


def remove_shard(directory: os.PathLike | str, name: str) -> None:
    """Delete a shard, its list first: a shard without a list does not exist."""
    for suffix in (".json", ".bin", ""):
        (Path(directory) / f"{name}{suffix}").unlink(missing_ok=True)


def clean_shards(directory: os.PathLike | str, header: StoreHeader, *, rank: int = 0, world_size: int = 1) -> int:
    """Before a resume: remove what a kill left half-written, what is damaged and what belongs to another header.

    Shards are dealt over the ranks, so each rank hashes its share. Returns how many shards were removed.
    """
    removed = 0
    folder = Path(directory)
    names = sorted({path.name.removeprefix(".").split(".")[0] for path in folder.glob("*shard-*")})
    for name in names[rank::world_size]:
        (folder / f".{name}.bin.tmp").unlink(missing_ok=True)
        if not (folder / f"{name}.json").exists():
            (folder / f"{name}.bin").unlink(missing_ok=True)
            continue
        problem = shard_problem(folder, name)
        if problem is None and read_shard(folder, name)["header"] != _plain(header):
            problem = "made from other features"
        if problem:
            log.warning("%s.bin: %s; it will be made again", folder / name, problem)
            remove_shard(folder, name)
            removed += 1
    return removed


def finished_samples(directory: os.PathLike | str) -> set[str]:
    """Ids of the samples in finished shards."""
    return {
        record["sample_id"] for name in shard_names(directory) for record in read_shard(directory, name)["records"]
    }


def join_index(directory: os.PathLike | str, order: Sequence[str], quarantined: set[str]) -> dict[str, Any]:
    """Write ``index.jsonl`` in the order of the sample ids; returns {shard: {bytes, sha256, samples}}.

    Raises UserError when a sample is neither in a shard nor quarantined.
    """
    records: dict[str, dict[str, Any]] = {}
    shards = {}
    for name in shard_names(directory):
        values = read_shard(directory, name)
        shards[name] = {"bytes": values["bytes"], "sha256": values["sha256"], "samples": len(values["records"])}
        for record in values["records"]:
            records[record["sample_id"]] = record | {"shard": name}
    missing = [sample_id for sample_id in order if sample_id not in records and sample_id not in quarantined]
    if missing:
        raise UserError(
            f"{directory}: {len(missing)} of {len(order)} samples are in no shard, the first is {missing[0]!r}. "
            f"Run {COMMAND} again: it makes only what is missing."
        )
    payload = b"".join(dump_row(records[sample_id]) for sample_id in order if sample_id in records)
    artifacts.atomic_write_bytes(Path(directory) / INDEX, payload)
    return shards


def _plain(header: StoreHeader) -> dict[str, Any]:
    return asdict(header) | {"layers": list(header.layers)}


class FeatureWriter:
    """Writes one rank's shards. A shard is written under a temporary name, synced, hashed and renamed when full.

    ``write`` refuses (BadFeatures, nothing stored) a sample with a NaN or a wrong number of rows. A full disk raises
    UserError and leaves the finished shards valid.
    """

    def __init__(self, directory: os.PathLike | str, header: StoreHeader, *, shard_bytes: int, rank: int = 0) -> None:
        self.directory, self.header = Path(directory), header
        self.directory.mkdir(parents=True, exist_ok=True)
        self._shard_bytes, self._rank = shard_bytes, rank
        prefix = f"shard-{rank:05d}-"
        taken = [int(name.removeprefix(prefix)) for name in shard_names(directory) if name.startswith(prefix)]
        self._sequence = max(taken, default=-1) + 1
        self._handle: Optional[BinaryIO] = None
        self._digest, self._offset, self._records = hashlib.sha256(), 0, list[dict[str, Any]]()
        self.samples = self.bytes = 0

    def write(self, sample: Sample, split: str, features: Tensor, last_hidden: Tensor) -> None:
        """Store ``features [T, M*D]`` and the rows of ``last_hidden [T, D]`` that predict a supervised label."""
        self._check_shapes(sample, features, last_hidden)
        rows = valid_anchors(sample.loss_mask)
        needed = last_hidden[rows.to(last_hidden.device)]
        check_finite(self.header, sample.sample_id, features, needed)
        pieces = self._encode(sample, features, needed)
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        record = Record(  # the offset is 0 again once a shard is sealed
            sample_id=sample.sample_id, domain=sample.domain, split=split, shard="", offset=self._offset,
            tokens=len(sample.input_ids), label_rows=len(rows), crc32=checksum,
        )
        try:
            self._append(pieces)
            self._records.append(asdict(record))
            if self._offset >= self._shard_bytes:
                self._seal()
        except OSError as error:
            raise self._disk_error(error) from None

    def close(self) -> None:
        """Finish the shard under construction."""
        try:
            self._seal()
        except OSError as error:
            raise self._disk_error(error) from None

    def abandon(self) -> None:
        """Drop the shard under construction."""
        if self._handle is not None:
            self._handle.close()
            self._handle, self._offset = None, 0
            self._path(".bin.tmp", hidden=True).unlink(missing_ok=True)

    def _check_shapes(self, sample: Sample, features: Tensor, last_hidden: Tensor) -> None:
        tokens, width = len(sample.input_ids), self.header.hidden_size
        expected = ((tokens, len(self.header.layers) * width), (tokens, width))
        found = (tuple(features.shape), tuple(last_hidden.shape))
        if found != expected:
            raise BadFeatures(
                f"sample {sample.sample_id!r} has {tokens} tokens: features and last_hidden must be {expected}, found "
                f"{found}. A server that reuses cached prefixes returns fewer rows; switch its prefix caching off."
            )

    def _encode(self, sample: Sample, features: Tensor, needed: Tensor) -> list[bytes]:
        """The record as pieces in file order. Encoded where the tensors are, so a GPU sends the stored size only."""
        tokens = len(sample.input_ids)
        layout = self.header.layout(tokens, len(needed))
        per_layer = features.detach().reshape(tokens, len(self.header.layers), -1)
        feature_data, feature_scales = codecs.encode(per_layer, self.header.codec)
        hidden_data, hidden_scales = codecs.encode(needed.detach(), self.header.codec)
        pieces, position = [], 0
        for section, content in (
            (layout.ids, sample.input_ids.numpy().astype(np.int32).tobytes()),
            (layout.mask, sample.loss_mask.numpy().astype(np.uint8).tobytes()),
            (layout.features, codecs.to_bytes(feature_data.cpu())),
            (layout.feature_scales, codecs.to_bytes(feature_scales.cpu())),
            (layout.hidden, codecs.to_bytes(hidden_data.cpu())),
            (layout.hidden_scales, codecs.to_bytes(hidden_scales.cpu())),
        ):
            assert len(content) == section.size, "layout and codec disagree"
            pieces += [bytes(section.offset - position), content]
            position = section.offset + section.size
        return [*pieces, bytes(layout.size - position)]

    def _append(self, pieces: list[bytes]) -> None:
        if self._handle is None:
            self._handle = open(self._path(".bin.tmp", hidden=True), "wb")
            self._digest, self._records = hashlib.sha256(), []
        for piece in pieces:
            self._handle.write(piece)
            self._digest.update(piece)
            self._offset += len(piece)

    def _seal(self) -> None:
        if self._handle is None:
            return
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        self._handle = None
        os.replace(self._path(".bin.tmp", hidden=True), self._path(".bin"))
        artifacts.fsync_directory(self.directory)
        values = {
            "header": _plain(self.header), "bytes": self._offset, "sha256": self._digest.hexdigest(),
            "records": self._records,
        }
        artifacts.atomic_write_bytes(self._path(".json"), json.dumps(values, ensure_ascii=False).encode())
        self.samples += len(self._records)
        self.bytes += self._offset
        self._sequence += 1
        self._offset = 0

    def _path(self, suffix: str, hidden: bool = False) -> Path:
        return self.directory / f"{'.' if hidden else ''}shard-{self._rank:05d}-{self._sequence:05d}{suffix}"

    def _disk_error(self, error: OSError) -> Exception:
        try:
            self.abandon()
        except OSError:
            # Closing flushes what the full disk did not take; the temporary file is removed at the next start.
            self._path(".bin.tmp", hidden=True).unlink(missing_ok=True)
            self._handle = None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        return UserError(
            f"{self.directory}: the disk is full after {self.samples} samples ({human_bytes(self.bytes)}) of this "
            f"rank. Finished shards are valid; free space and run {COMMAND} again: it continues from there."
        )
