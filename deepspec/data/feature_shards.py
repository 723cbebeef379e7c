"""Shards of a feature store: written whole or not at all, found again after a kill, joined into one index."""

import errno
import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Optional, Sequence

from torch import Tensor

from deepspec import artifacts
from deepspec.data.batch import Sample
from deepspec.data.feature_format import COMMAND, INDEX, Record, StoreHeader, human_bytes
from deepspec.data.feature_records import Pieces, encode_record
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
    for path in folder.glob(f".{INDEX}.*") if rank == 0 else ():
        path.unlink()
    names = sorted({path.name.removeprefix(".").split(".")[0] for path in folder.glob("*shard-*")})
    for name in names[rank::world_size]:
        for path in folder.glob(f".{name}.*"):
            path.unlink()
        if not (folder / f"{name}.json").exists():
            (folder / f"{name}.bin").unlink(missing_ok=True)
            continue
        problem = shard_problem(folder, name)
        if problem is None and read_shard(folder, name)["header"] != header.to_json():
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


class ShardFile:
    """A shard being written under a temporary name; it exists, or replaces the one of its name, once it is sealed."""

    def __init__(self, directory: os.PathLike | str, name: str, header: StoreHeader) -> None:
        self._directory, self.name, self._header = Path(directory), name, header
        self._temporary = self._directory / f".{name}.bin.tmp"
        self._handle: Optional[BinaryIO] = open(self._temporary, "wb")
        self._digest, self._records = hashlib.sha256(), list[dict[str, Any]]()
        self.bytes = 0

    @property
    def samples(self) -> int:
        return len(self._records)

    def append(self, record: Record, pieces: Pieces) -> None:
        """Add the bytes of one sample."""
        assert self._handle is not None, "sealed"
        line = replace(record, offset=self.bytes, shard="").to_json()
        for piece in pieces:
            self._handle.write(piece)
            self._digest.update(piece)
            self.bytes += len(piece)
        self._records.append(line)

    def seal(self) -> None:
        """Sync and rename the data, then write the list."""
        assert self._handle is not None, "sealed"
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        self._handle = None
        os.replace(self._temporary, self._directory / f"{self.name}.bin")
        artifacts.fsync_directory(self._directory)
        values = {"header": self._header.to_json(), "bytes": self.bytes, "sha256": self._digest.hexdigest(),
                  "records": self._records}
        payload = json.dumps(values, ensure_ascii=False).encode()
        artifacts.atomic_write_bytes(self._directory / f"{self.name}.json", payload)

    def abandon(self) -> None:
        """Drop it."""
        if self._handle is None:
            return
        try:
            self._handle.close()
        except OSError:
            pass  # closing flushes what a full disk did not take
        self._handle = None
        self._temporary.unlink(missing_ok=True)


class FeatureWriter:
    """Writes one rank's shards. A shard is written under a temporary name, synced, hashed and renamed when full.

    ``write`` refuses (BadFeatures, nothing stored) a sample with a NaN or a wrong number of rows. A full disk raises
    UserError and leaves the finished shards valid.
    """

    def __init__(self, directory: os.PathLike | str, header: StoreHeader, *, shard_bytes: int, rank: int = 0) -> None:
        self.directory, self.header = Path(directory), header
        self.directory.mkdir(parents=True, exist_ok=True)
        self._shard_bytes, self._prefix = shard_bytes, f"shard-{rank:05d}-"
        names = [name for name in shard_names(directory) if name.startswith(self._prefix)]
        self._sequence = max((int(name.removeprefix(self._prefix)) for name in names), default=-1) + 1
        self._shard: Optional[ShardFile] = None
        self.samples = self.bytes = 0

    def write(self, sample: Sample, split: str, features: Tensor, last_hidden: Tensor) -> None:
        """Store ``features [T, M*D]`` and the rows of ``last_hidden [T, D]`` that predict a supervised label."""
        self.append(*encode_record(self.header, sample, split, features, last_hidden))

    def append(self, record: Record, pieces: Pieces) -> None:
        """Store a sample that ``encode_record`` has made bytes of."""
        try:
            if self._shard is None:
                self._shard = ShardFile(self.directory, f"{self._prefix}{self._sequence:05d}", self.header)
            self._shard.append(record, pieces)
            if self._shard.bytes >= self._shard_bytes:
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
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def _seal(self) -> None:
        if self._shard is None:
            return
        self._shard.seal()
        self.samples += self._shard.samples
        self.bytes += self._shard.bytes
        self._sequence += 1
        self._shard = None

    def _disk_error(self, error: OSError) -> Exception:
        self.abandon()
        reason = disk_problem(error)
        if reason is None:
            return error
        return UserError(
            f"{self.directory}: {reason} after {self.samples} samples ({human_bytes(self.bytes)}) of this rank. "
            "Finished shards are valid; make room and start the same command again: it continues from there."
        )


def disk_problem(error: OSError) -> Optional[str]:
    """What keeps a file from growing, None if the error is of another kind."""
    return {
        errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "a shard is larger than a file may be here (see ulimit -f; features.shard_megabytes)",
    }.get(error.errno or 0)
