"""Damaged samples made again, everything else kept byte for byte."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Iterator, Protocol, Sequence

from deepspec import artifacts
from deepspec.data.batch import FeatureSample
from deepspec.data.feature_format import COMMAND, INDEX, Record
from deepspec.data.feature_records import Pieces, encode_record
from deepspec.data.feature_shards import FeatureWriter, ShardFile, disk_problem, join_index, remove_shard
from deepspec.data.features.check import Catalog, Damage, find_damage, read_catalog, read_raw, require_finished
from deepspec.errors import UserError

log = logging.getLogger(__name__)

_NEW_SHARD_BYTES = 512 * 2**20


class Remaker(Protocol):
    """Whatever made the samples of a store."""

    def order(self) -> list[str]:
        """Ids of all samples, in the order of the store's index."""
        ...

    def remake(self, sample_ids: Sequence[str]) -> Iterator[tuple[str, FeatureSample]]:
        """(split, sample with hidden states) of each id, in any order. Raises UserError for an id it cannot make."""
        ...


@dataclass(frozen=True)
class Repaired:
    """What was wrong, and how many samples were made again."""

    damage: list[Damage]
    samples: int = 0


def repair(directory: Path, make_remaker: Callable[[Catalog], Remaker]) -> Repaired:
    """Make the damaged samples again, in their old places, and finish the store.

    ``make_remaker`` is only called when something is damaged. The store counts as unfinished meanwhile; a repair that
    is cut short is continued by the next one. Raises UserError when a sample cannot be made.
    """
    catalog = read_catalog(directory)
    require_finished(catalog)
    damage = list(find_damage(catalog))
    if not damage and catalog.manifest.status == "complete":
        return Repaired([])
    for item in damage:
        log.info("%s", item)
    remaker = make_remaker(catalog)
    order = catalog.order if catalog.order is not None else remaker.order()
    _mark_unfinished(catalog)
    made = 0
    try:
        for item in damage:
            if item.file != INDEX:
                made += _rewrite(catalog, item, remaker)
        made += _fill_gaps(catalog, order, remaker)
        shards = join_index(directory, order, catalog.quarantined)
    except OSError as error:
        reason = disk_problem(error)
        if reason is None:
            raise
        raise UserError(f"{directory}: {reason}. Make room and repair it again.") from None
    facts = {"shards": shards, "bytes": sum(shard["bytes"] for shard in shards.values())}
    artifacts.complete(directory, catalog.manifest, [INDEX], facts)
    return Repaired(damage, made)


def _mark_unfinished(catalog: Catalog) -> None:
    """The hash of the index stays in the manifest: the next repair then knows that it may trust the index."""
    values = asdict(catalog.manifest) | {"status": "incomplete"}
    artifacts.atomic_write_json(catalog.directory / artifacts.MANIFEST, values)


def _rewrite(catalog: Catalog, damage: Damage, remaker: Remaker) -> int:
    """One shard again, its good records copied; returns how many samples were made."""
    if catalog.shards[damage.file] is None:
        remove_shard(catalog.directory, damage.file)
        return 0
    made = _encoded(catalog, damage.sample_ids, remaker)
    shard = ShardFile(catalog.directory, damage.file, catalog.header)
    try:
        for record, raw in read_raw(catalog, damage.file):
            shard.append(*(made[record.sample_id] if raw is None else (record, [raw.data])))
        shard.seal()
    finally:
        shard.abandon()
    return len(made)


def _encoded(catalog: Catalog, sample_ids: Sequence[str], remaker: Remaker) -> dict[str, tuple[Record, Pieces]]:
    made = {}
    if sample_ids:
        for split, item in remaker.remake(sample_ids):
            made[item.sample.sample_id] = encode_record(catalog.header, item.sample, split, item.features,
                                                        item.last_hidden)
    missing = [sample_id for sample_id in sample_ids if sample_id not in made]
    if missing:
        raise UserError(f"{catalog.directory}: sample {missing[0]!r} could not be made again ({len(missing)} in all).")
    return made


def _fill_gaps(catalog: Catalog, order: Sequence[str], remaker: Remaker) -> int:
    """Samples of shards of which no list was left, into shards of their own."""
    there = {record.sample_id for records in catalog.shards.values() for record in records or ()}
    gaps = [sample_id for sample_id in order if sample_id not in there and sample_id not in catalog.quarantined]
    if not gaps:
        return 0
    writer = FeatureWriter(catalog.directory, catalog.header, shard_bytes=_NEW_SHARD_BYTES)
    for split, item in remaker.remake(gaps):
        writer.write(item.sample, split, item.features, item.last_hidden)
    writer.close()
    return len(gaps)


def remove_damaged(directory: Path) -> list[Damage]:
    """Delete damaged files and mark the store unfinished, so that the next extraction makes what is missing."""
    catalog = read_catalog(directory)
    damage = list(find_damage(catalog))
    if not damage:
        return []
    values = asdict(catalog.manifest) | {"status": "incomplete", "files": {}}
    artifacts.atomic_write_json(directory / artifacts.MANIFEST, values)
    for item in damage:
        remove_shard(directory, item.file)
    log.info("%s: removed %s. Make them again with: %s", directory, ", ".join(item.file for item in damage), COMMAND)
    return damage
