"""A cache of another project into a feature store, checked sample by sample."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from deepspec import artifacts
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample
from deepspec.data.feature_codec import layout
from deepspec.data.feature_format import (
    INDEX, PRODUCER, BadFeatures, StoreHeader, convention_of, human_bytes, require_disk,
)
from deepspec.data.feature_shards import FeatureWriter, clean_shards, finished_samples, join_index
from deepspec.data.features.cache import SOURCE, ForeignCache, SourceOptions, open_cache, split_of
from deepspec.data.features.held_out import HeldOutRows
from deepspec.data.features.targets import load_folder
from deepspec.data.progress import Progress
from deepspec.data.prompts import SPLITS
from deepspec.errors import InputRefused, UserError
from deepspec.targets.frozen import FrozenTarget

log = logging.getLogger(__name__)

UNCHECKED = "unchecked"  # target_fingerprint of a store whose target was not at hand
RENDERER = "imported"
TOLERANCE = 0.05  # relative difference to the target's own numbers: bfloat16, other kernels
QUARANTINE_LIMIT = 0.01


@dataclass(frozen=True)
class Imported:
    """Totals of an import."""

    samples: int
    no_anchors: int
    quarantined: int
    bytes: int


def open_source(options: SourceOptions) -> tuple[ForeignCache, Optional[FrozenTarget]]:
    """The cache, and its target where one was given."""
    if options.target is None:
        return open_cache(options, None), None
    if options.format == "deepspec":  # says its layers itself
        cache = open_cache(options, None)
        return cache, load_folder(options.target, options.dtype, cache.layers)
    shift = 1 if options.format == "speculators" else 0
    target = load_folder(options.target, options.dtype, [layer - shift for layer in options.layers or ()])
    return open_cache(options, target.final_norm), target


def import_cache(options: SourceOptions, directory: Path, *, codec: str, shard_bytes: int = 512 * 2**20) -> Imported:
    """Write the store; what a kill left of an earlier import is continued.

    Raises InputRefused for a cache that is damaged, of another format, or not of the given target, UserError when
    more than 1 % of its samples hold no usable numbers.
    """
    cache, target = open_source(options)
    header = StoreHeader(
        target_fingerprint=target.fingerprint if target else UNCHECKED, renderer_hash=RENDERER,
        responses_fingerprint=cache.fingerprint, layers=cache.layers, hidden_size=cache.hidden_size, codec=codec,
        source_dtype=cache.dtype, convention=convention_of(target is not None and target.family.streams),
    )
    needed = _estimate(cache, codec)
    log.info("import: %d samples, at most about %s as %s", len(cache), human_bytes(needed), codec)
    fingerprint = artifacts.canonical_hash({"header": header.to_json(), SOURCE: options.to_json()})
    if artifacts.is_complete(directory, fingerprint):
        raise InputRefused(f"{directory} holds this import already.")
    if target is not None:
        check_target(cache, target)
    there = sum(path.stat().st_size for path in directory.glob("shard-*.bin")) if directory.exists() else 0
    require_disk(directory, max(0, needed - there))
    manifest = artifacts.begin(directory, PRODUCER, fingerprint, config={SOURCE: options.to_json()},
                               facts={"header": header.to_json(), "estimated_bytes": needed})
    clean_shards(directory, header)
    return _copy(cache, options, target, FeatureWriter(directory, header, shard_bytes=shard_bytes), manifest)


def _estimate(cache: ForeignCache, codec: str) -> int:
    """From the cache's own size: the last hidden state of tokens that predict nothing is not kept."""
    layers, width = len(cache.layers), cache.hidden_size
    theirs = 1000 * (layers + 1) * width * getattr(torch, cache.dtype).itemsize
    ours = layout(codec, tokens=1000, label_rows=1000, layers=layers, width=width).size
    return round(cache.stored_bytes * ours / theirs) + 400 * len(cache)


def check_target(cache: ForeignCache, target: FrozenTarget) -> None:
    """Compare the first sample with the target's own pass. Raises InputRefused for other logits or other layers."""
    if cache.hidden_size != target.spec.hidden_size:
        raise InputRefused(f"{cache.directory}: hidden states of width {cache.hidden_size}, but {target.name} has "
                           f"{target.spec.hidden_size}.")
    item = cache.read(0)
    own = target.encode(item.sample.input_ids, [len(item.sample.input_ids)])
    last, reference = item.last_hidden.to(target.device, target.dtype), target.logits(own.last_hidden)
    columns = torch.isfinite(reference[0])
    difference = relative(target.logits(last)[:, columns], reference[:, columns])
    if not difference <= TOLERANCE:
        raise InputRefused(
            f"{cache.directory}, sample {item.sample.sample_id!r}: lm_head(last_hidden) differs from the logits of "
            f"{target.name} by {difference:.0%}. The cache is of another model, or its last hidden states are not "
            "those after the final norm."
        )
    pairs = zip(cache.layers, item.features.split(cache.hidden_size, 1), own.features.split(cache.hidden_size, 1))
    for layer, theirs, ours in pairs:
        difference = relative(theirs.to(target.device), ours)
        if not difference <= TOLERANCE:
            raise InputRefused(
                f"{cache.directory}, sample {item.sample.sample_id!r}: the hidden states of layer {layer} (our id) "
                f"differ from those of {target.name} by {difference:.0%}. Are the layer ids right, in the convention "
                "of the project that made the cache?"
            )


def relative(values: Tensor, reference: Tensor) -> float:
    """``|values - reference| / |reference|``, both norms over everything."""
    return float((values.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-12))


def _copy(cache: ForeignCache, options: SourceOptions, target: Optional[FrozenTarget], writer: FeatureWriter,
          manifest: artifacts.Manifest) -> Imported:
    """Every usable sample, then index and manifest."""
    done, dropped, aside = finished_samples(writer.directory), Counter[str](), list[str]()
    order, splits, tokens = list[str](), Counter[str](), 0
    limit = max(1, int(QUARANTINE_LIMIT * len(cache)))
    with HeldOutRows(writer.directory, manifest.fingerprint) as rows, \
            Progress("import", len(cache), "samples") as progress:
        for index in range(len(cache)):
            item = cache.read(index)
            name, split = item.sample.sample_id, split_of(cache.sample_id(index), options.held_out)
            _check_ids(cache, item, target)
            progress.add(len(item.sample.input_ids))
            if not len(valid_anchors(item.sample.loss_mask)):
                dropped["no anchors"] += 1
                continue
            try:
                if name not in done:
                    writer.write(item.sample, split, item.features, item.last_hidden)
            except BadFeatures as error:
                log.error("import: set aside: %s", error)
                aside.append(name)
                if len(aside) > limit:
                    writer.close()
                    raise UserError(f"{cache.directory}: {len(aside)} samples have unusable hidden states, at most "
                                    f"{limit} may; the last: {error}") from None
                continue
            order.append(name)
            splits[split] += 1
            if split == "held_out":
                rows.add(item.sample)
            tokens += len(item.sample.input_ids)
    writer.close()
    shards = join_index(writer.directory, order, set(aside))
    facts: dict[str, Any] = {
        "shards": shards, "quarantined": aside, "tokens": tokens, "dropped": dict(dropped),
        "bytes": sum(shard["bytes"] for shard in shards.values()), "samples": {name: splits[name] for name in SPLITS},
    }
    artifacts.complete(writer.directory, manifest, [INDEX], facts)
    return Imported(len(order), dropped["no anchors"], len(aside), facts["bytes"])


def _check_ids(cache: ForeignCache, item: FeatureSample, target: Optional[FrozenTarget]) -> None:
    if target is not None and int(item.sample.input_ids.max()) >= target.spec.vocab_size:
        raise InputRefused(f"{cache.directory}, sample {item.sample.sample_id!r}: token id "
                           f"{int(item.sample.input_ids.max())}, but the embedding of {target.name} has only "
                           f"{target.spec.vocab_size} rows.")


def moved(options: SourceOptions, target: Optional[str]) -> SourceOptions:
    """The options with the target where it is now."""
    return options if target is None else replace(options, target=target)
