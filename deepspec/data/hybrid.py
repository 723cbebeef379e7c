"""Hidden states that are computed in the first epoch, written to a feature store, and read from it afterwards.

What is trained on is always what the store gives back: a sample that was just computed goes through the codec first,
so that every epoch sees the same numbers. T tokens, M layers, D width.
"""

import time
from pathlib import Path
from typing import Callable, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.encoded import StoredSample
from deepspec.data.feature_format import Record, StoreHeader, record_from_json
from deepspec.data.feature_records import decode_record, encode_record, is_intact, record_size
from deepspec.data.feature_shards import FeatureWriter, read_shard, shard_names
from deepspec.data.sources import CachedFeatures, HiddenStateModel, SampleInfo, encode_samples, token_batches
from deepspec.errors import InputRefused


class GrowingStore:
    """A store while this rank adds to it: samples of finished shards can be read. Not for several threads at once."""

    def __init__(self, directory: Path, header: StoreHeader, writer: FeatureWriter) -> None:
        self.directory, self.header, self._writer = directory, header, writer
        self._records: dict[str, Record] = {}
        self._unfinished: set[str] = set()  # written by this rank, into a shard that is not finished
        self._known: set[str] = set()
        self._look()

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._records or sample_id in self._unfinished

    def read(self, sample_id: str, dtype: Optional[torch.dtype]) -> FeatureSample:
        """A sample as it is stored. Raises InputRefused if its bytes are not what was written."""
        if sample_id in self._unfinished:
            self.seal()
        record = self._records[sample_id]
        path = self.directory / f"{record.shard}.bin"
        raw = np.fromfile(path, np.uint8, record_size(self.header, record), offset=record.offset)
        if not is_intact(self.header, record, raw):
            raise InputRefused(f"{path}: checksum of sample {sample_id!r} differs. Start the same command again: "
                               "damaged shards are found and their samples computed again.")
        return decode_record(self.header, record, raw, dtype)

    def add(self, sample: Sample, split: str, features: Tensor, last_hidden: Tensor,
            dtype: Optional[torch.dtype]) -> FeatureSample:
        """Store ``features [T, M*D]`` and ``last_hidden [T, D]``; returns what reading them would give.

        Raises BadFeatures for a NaN, UserError when the disk is full.
        """
        record, pieces = encode_record(self.header, sample, split, features, last_hidden)
        self._writer.append(record, pieces)
        self._unfinished.add(sample.sample_id)
        raw = np.frombuffer(bytearray(b"".join(pieces)), np.uint8)
        return decode_record(self.header, record, raw, dtype)

    def seal(self) -> None:
        """Finish the shard under construction: what it holds outlives a kill."""
        self._writer.close()
        self._look()

    def _look(self) -> None:
        """Samples of finished shards that were not known yet."""
        for name in shard_names(self.directory):
            if name in self._known:
                continue
            self._known.add(name)
            for line in read_shard(self.directory, name)["records"]:
                self._records[line["sample_id"]] = record_from_json(line | {"shard": name})
        self._unfinished -= self._records.keys()


class HybridFeatures:
    """Samples of one split: from the store where it has them, else from the target and into the store.

    ``finish``, which all ranks call together after the first epoch, completes the store, drops the target and goes on
    with the finished store; ``filling`` says whether that is still to come.
    """

    def __init__(self, filler: "Filler", split: str, documents: Sequence[Sample], *, token_budget: int,
                 dtype: Optional[torch.dtype]) -> None:
        self.documents = documents
        self.samples = [SampleInfo(item.sample_id, item.domain, len(item.input_ids)) for item in documents]
        self._filler, self._split, self._budget, self._dtype = filler, split, token_budget, dtype
        filler.parts.append(self)
        self._cached: Optional[CachedFeatures] = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def filling(self) -> bool:
        """Whether the store is still unfinished; the same on all ranks."""
        return self._cached is None

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices`` in ``dtype``, as the store gives them back."""
        if self._cached is not None:
            return self._cached.get(indices)
        documents = [self.documents[index] for index in indices]
        missing = [item for item in documents if item.sample_id not in self._filler.store]
        found: dict[str, FeatureSample] = {}
        for chunk in token_batches([len(item.input_ids) for item in missing], self._budget):
            for item in self._filler.compute([missing[position] for position in chunk]):
                found[item.sample.sample_id] = self._filler.store.add(
                    item.sample, self._split, item.features, item.last_hidden, self._dtype)
        ids = [item.sample_id for item in documents]
        found |= {name: self._filler.store.read(name, self._dtype) for name in ids if name not in found}
        return [found[name] for name in ids]

    def get_stored(self, indices: Sequence[int]) -> Sequence[FeatureSample | StoredSample]:
        """The same, as it lies in the store once that is finished."""
        return self.get(indices) if self._cached is None else self._cached.get_stored(indices)

    def finish(self) -> None:
        """Complete the store of all splits. Collective; nothing may read a split meanwhile."""
        self._filler.finish()

    def switch(self, cached: CachedFeatures) -> None:
        """Go on with the finished store. Raises InputRefused if a sample was set aside there."""
        if [info.sample_id for info in cached.samples] != [info.sample_id for info in self.samples]:
            lacking = {info.sample_id for info in self.samples} - {info.sample_id for info in cached.samples}
            raise InputRefused(f"{cached.store.directory}: {len(lacking)} samples have unusable hidden states, for "
                               f"example {min(lacking, default='')!r}, and the first epoch has counted them in. Train "
                               "with features=cached, which leaves them out, and trainer.resume=never.")
        self._cached = cached


class Filler:
    """What the splits of a store share while it is filled: target, growing store, and how it is completed.

    ``complete(tokens, seconds)`` is given what this rank has computed and in which time.
    """

    def __init__(self, target: HiddenStateModel, store: GrowingStore, complete: Callable[[int, float], None],
                 opened: Callable[[str], CachedFeatures]) -> None:
        self.store = store
        self.parts: list[HybridFeatures] = []
        self._target: Optional[HiddenStateModel] = target
        self._complete: Optional[Callable[[int, float], None]] = complete
        self._opened = opened
        self._tokens, self._seconds = 0, 0.0

    def compute(self, documents: Sequence[Sample]) -> list[FeatureSample]:
        """One forward of the target."""
        assert self._target is not None, "the store is finished"
        started = time.perf_counter()
        result = encode_samples(self._target, documents)
        self._seconds += time.perf_counter() - started
        self._tokens += sum(len(item.input_ids) for item in documents)
        return result

    def finish(self) -> None:
        """Have what is missing computed by all ranks, and every split read the finished store. Collective."""
        self.store.seal()
        assert self._complete is not None, "finished already"
        self._complete(self._tokens, self._seconds)
        for part in self.parts:
            part.switch(self._opened(part._split))
        self._target = self._complete = None  # frees the target's memory
