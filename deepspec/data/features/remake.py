"""The real ways to make a sample of a store again: from the responses with the target, or from the imported cache."""

from itertools import chain
from pathlib import Path
from typing import Iterator, Optional, Sequence

from deepspec import artifacts
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.features.cache import SOURCE, options_from_json, split_of
from deepspec.data.features.check import Catalog
from deepspec.data.features.importing import moved, open_source
from deepspec.data.features.repair import Remaker
from deepspec.data.features.targets import load_for_features
from deepspec.data.prompts import SPLITS
from deepspec.data.samples import load_samples
from deepspec.data.sources import HiddenStateModel, encode_samples, token_batches
from deepspec.errors import InputRefused
from deepspec.targets.frozen import FrozenTarget

_TOKEN_BUDGET = 8192


class FromTarget:
    """Samples of the responses, through the target."""

    def __init__(self, splits: dict[str, Sequence[Sample]], target: HiddenStateModel) -> None:
        self._splits, self._target = splits, target

    def order(self) -> list[str]:
        """Ids as extraction orders them: split by split, each in the order of the prompts."""
        return [sample.sample_id for sample in chain.from_iterable(self._splits.values())]

    def remake(self, sample_ids: Sequence[str]) -> Iterator[tuple[str, FeatureSample]]:
        """(split, sample) of every id the responses have."""
        wanted = set(sample_ids)
        found = [
            (split, sample) for split, samples in self._splits.items() for sample in samples
            if sample.sample_id in wanted
        ]
        for batch in token_batches([len(sample.input_ids) for _, sample in found], _TOKEN_BUDGET):
            made = encode_samples(self._target, [found[place][1] for place in batch])
            yield from ((found[place][0], item) for place, item in zip(batch, made))


def from_target(catalog: Catalog, *, responses: Optional[Path] = None, target_path: Optional[str] = None) -> Remaker:
    """The remaker a store's manifest describes. Raises InputRefused when its responses or its target are not there.

    ``responses`` and ``target_path`` say where they are if they moved; both are checked by content.
    """
    if SOURCE in catalog.manifest.config:
        return FromCache(catalog, target_path)
    if (served := catalog.manifest.facts.get("served")) is not None:
        raise InputRefused(f"{catalog.directory} was made by a server ({served.get('engine')}, {served.get('model')}), "
                           "whose numbers the target here need not have. Drop what is damaged with --remove and make "
                           "it again with: data_prep/extract_features.py features=server")
    key = catalog.manifest.config.get("responses")
    if not isinstance(key, dict):
        raise InputRefused(f"{catalog.directory}: its manifest does not say which target made it.")
    folder = responses or catalog.directory.resolve().parent / f"responses-{artifacts.canonical_hash(key, 12)}"
    manifest = artifacts.require_complete(folder, "Responses", "data_prep/generate_responses.py")
    if artifacts.canonical_hash(manifest.files) != catalog.header.responses_fingerprint:
        raise InputRefused(f"{folder}: these are not the responses of which {catalog.directory} has the features.")
    target = load_known_target(catalog, key["target"], target_path)
    splits: dict[str, Sequence[Sample]] = {
        split: load_samples(folder, split, key["max_length"], vocab_size=target.spec.vocab_size) for split in SPLITS
    }
    return FromTarget(splits, target)


def load_known_target(catalog: Catalog, identity: dict[str, object], path: Optional[str]) -> FrozenTarget:
    """The target of a store, through deepspec.targets.load. Raises InputRefused if its fingerprint is another."""
    options = dict(identity)
    if path is not None:
        options |= {"source": "hf", "path": path, "revision": None}
    # Converted targets lie beside the features of all targets: DATA_ROOT/targets.
    target = load_for_features(options, catalog.header.layers, catalog.directory.resolve().parents[1] / "targets")
    if target.fingerprint != catalog.header.target_fingerprint:
        raise InputRefused(f"{options['path'] or options['source']} is not the target that made {catalog.directory}: "
                           f"its fingerprint is {target.fingerprint}, expected {catalog.header.target_fingerprint}.")
    return target


class FromCache:
    """Samples of an imported store, from the cache they came from."""

    def __init__(self, catalog: Catalog, target_path: Optional[str]) -> None:
        self._options = moved(options_from_json(catalog.manifest.config[SOURCE]), target_path)
        self._source, _ = open_source(self._options)
        if self._source.fingerprint != catalog.header.responses_fingerprint:
            raise InputRefused(f"{self._source.directory}: not the cache that {catalog.directory} was imported from.")

    def order(self) -> list[str]:
        """Ids of the samples that have a place for a block, in the order of the cache."""
        samples = (self._source.read(index).sample for index in range(len(self._source)))
        return [sample.sample_id for sample in samples if len(valid_anchors(sample.loss_mask))]

    def remake(self, sample_ids: Sequence[str]) -> Iterator[tuple[str, FeatureSample]]:
        """(split, sample) of every id the cache has."""
        wanted = set(sample_ids)
        for index in range(len(self._source)):
            if (name := self._source.sample_id(index)) in wanted:
                yield split_of(name, self._options.held_out), self._source.read(index)
