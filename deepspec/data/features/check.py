"""Which bytes of a feature store are not what was written, down to the samples they belong to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

import numpy as np

from deepspec import artifacts
from deepspec.data.feature_format import COMMAND, INDEX, PRODUCER, Record, StoreHeader, header_of, record_from_json
from deepspec.data.feature_records import is_intact, record_size
from deepspec.data.feature_shards import read_shard, shard_names, shard_problem
from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused


@dataclass(frozen=True)
class Damage:
    """One damaged file and the samples it costs."""

    file: str  # name without suffix for shards, else INDEX
    reason: str
    sample_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.file if self.file == INDEX else f"{self.file}.bin"
        named = ", ".join(map(repr, self.sample_ids[:20])) + (", ..." if len(self.sample_ids) > 20 else "")
        return f"{name}: {self.reason}" + (f"; {len(self.sample_ids)} samples: {named}" if self.sample_ids else "")


@dataclass(frozen=True)
class Catalog:
    """What a store should hold, from whichever of its two lists can be trusted."""

    directory: Path
    manifest: artifacts.Manifest
    header: StoreHeader
    order: Optional[list[str]]  # sample ids as the index has them; None where there is no valid index
    shards: dict[str, Optional[list[Record]]]  # by name; None where nobody knows any more what was in it

    @property
    def quarantined(self) -> set[str]:
        return set(self.manifest.facts.get("quarantined", ()))


def read_catalog(directory: Path) -> Catalog:
    """Catalog of a finished store, or of one whose repair was cut short. Raises InputRefused for anything else."""
    manifest = artifacts.read_manifest(directory)
    if manifest is None or manifest.producer != PRODUCER or "header" not in manifest.facts:
        raise InputRefused(f"{directory} is not a feature store: it has no {artifacts.MANIFEST} of one.")
    header = header_of(directory, manifest)
    index = directory / INDEX
    valid = index.exists() and INDEX in manifest.files and artifacts.sha256_file(index) == manifest.files[INDEX]
    rows = [record_from_json(row) for _, row in read_rows(index)] if valid else []
    by_shard: dict[str, list[Record]] = {}
    for row in rows:
        by_shard.setdefault(row.shard, []).append(row)
    shards: dict[str, Optional[list[Record]]] = {}
    for name in sorted(set(manifest.facts.get("shards", {})) | set(shard_names(directory))):
        listed = sorted(by_shard[name], key=lambda record: record.offset) if name in by_shard else None
        shards[name] = listed or _listed(directory, name)
    return Catalog(Path(directory), manifest, header, [row.sample_id for row in rows] if valid else None, shards)


def _listed(directory: Path, name: str) -> Optional[list[Record]]:
    try:
        return [record_from_json(record | {"shard": name}) for record in read_shard(directory, name)["records"]]
    except (OSError, ValueError, TypeError):
        return None


def find_damage(catalog: Catalog) -> Iterator[Damage]:
    """Hash every byte; one entry per damaged file."""
    finished = catalog.manifest.status == "complete"
    if finished and catalog.order is None:
        yield Damage(INDEX, "missing or changed since it was written")
    for name, records in catalog.shards.items():
        reason = shard_problem(catalog.directory, name) or (_changed_list(catalog, name) if finished else None)
        if reason is None:
            continue
        yield Damage(name, reason, tuple(
            record.sample_id for record, raw in read_raw(catalog, name) if raw is None
        ) if records is not None else ())


def _changed_list(catalog: Catalog, name: str) -> Optional[str]:
    """A list that agrees with its data may still differ from what manifest and index say of both."""
    expected = catalog.manifest.facts.get("shards", {}).get(name)
    if expected is None or read_shard(catalog.directory, name)["sha256"] != expected["sha256"]:
        return "not a shard of which the manifest speaks"
    if catalog.order is not None and _listed(catalog.directory, name) != catalog.shards[name]:
        return "its list differs from the index"
    return None


def read_raw(catalog: Catalog, name: str) -> Iterator[tuple[Record, Optional[np.ndarray]]]:
    """Records of a shard in file order, with their bytes [uint8] where those are intact."""
    path = catalog.directory / f"{name}.bin"
    if not path.exists():
        yield from ((record, None) for record in catalog.shards[name] or ())
        return
    with open(path, "rb") as handle:
        for record in catalog.shards[name] or ():
            handle.seek(record.offset)
            raw = np.frombuffer(handle.read(record_size(catalog.header, record)), dtype=np.uint8)
            yield record, raw if is_intact(catalog.header, record, raw) else None


def require_finished(catalog: Catalog) -> None:
    """Raise InputRefused for a store under construction: extraction itself checks what it continues from."""
    if catalog.manifest.status != "complete" and INDEX not in catalog.manifest.files:
        raise InputRefused(f"{catalog.directory} is unfinished. Continue with: {COMMAND}, which checks every shard "
                           "that is there and makes what is missing.")
