"""Where hidden states come from while training: a store on disk, or the target itself. Both give the same numbers
up to the rounding of the store's codec. M layers, D width, T tokens."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Protocol, Sequence

import torch
from torch import Tensor

from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.encoded import StoredSample
from deepspec.data.feature_format import CONVENTION, StoreHeader
from deepspec.data.feature_store import FeatureStore
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)
MAKE_AGAIN = "Delete that folder and make them again with: data_prep/extract_features.py"


@dataclass(frozen=True)
class SampleInfo:
    """What can be known of a sample without reading it."""

    sample_id: str
    domain: str
    length: int  # tokens
    anchors: Optional[int] = field(default=None, compare=False)  # valid ones; None: the loss mask must be looked at


class FeatureSource(Protocol):
    """Samples with the target's hidden states, by index.

    ``documents``, where a source has it, are the same samples without hidden states and cheap to get; token ids may be
    missing there.
    """

    @property
    def samples(self) -> Sequence[SampleInfo]:
        """What is known of each without reading it."""
        ...

    def __len__(self) -> int: ...

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices``, in that order."""
        ...


class HiddenStateModel(Protocol):
    """The part of FrozenTarget used here."""

    device: torch.device

    def encode(self, input_ids: Tensor, lengths: list[int]) -> Any:
        """Packed documents ``[T] int64`` -> ``.features [T, M*D]`` and ``.last_hidden [T, D]``."""
        ...


@dataclass(frozen=True)
class Expected:
    """What features must be of; None where the caller does not care."""

    target_fingerprint: Optional[str] = None
    layers: Optional[tuple[int, ...]] = None
    renderer_hash: Optional[str] = None
    responses_fingerprint: Optional[str] = None
    convention: Optional[str] = CONVENTION


def check_header(directory: os.PathLike | str, header: StoreHeader, expected: Expected,
                 allow: frozenset[str] = frozenset(), remedy: str = MAKE_AGAIN) -> None:
    """Raise InputRefused naming the first field that differs, both values and ``remedy``; those in ``allow`` only warn.

    Nothing compares paths: a model that moved to another folder keeps its fingerprint.
    """
    for name in ("target_fingerprint", "layers", "convention", "renderer_hash", "responses_fingerprint"):
        wanted, found = getattr(expected, name), getattr(header, name)
        if wanted is None:
            continue
        wanted = tuple(wanted) if name == "layers" else wanted
        if wanted == found:
            continue
        message = f"{directory}: features have {name}={_shown(found)}, but this run needs {name}={_shown(wanted)}."
        if name not in allow:
            raise InputRefused(f"{message} {remedy}")
        log.warning("%s Used anyway, as asked.", message)


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


class StoredMasks(Sequence[Sample]):
    """Samples of a store with their loss mask and zeros for token ids; nothing is kept."""

    def __init__(self, store: FeatureStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        record, mask = self._store.records[index], self._store.loss_mask(index)
        return Sample(record.sample_id, record.domain, torch.zeros((), dtype=torch.int64).expand(len(mask)), mask)


class CachedFeatures:
    """Samples of a finished feature store. Raises InputRefused if it is of another target, layers or renderer."""

    def __init__(self, directory: os.PathLike | str, *, split: str = "train", expected: Optional[Expected] = None,
                 dtype: Optional[torch.dtype] = None, allow: frozenset[str] = frozenset(),
                 remedy: str = MAKE_AGAIN) -> None:
        self.store = FeatureStore(Path(directory), split)
        check_header(directory, self.store.header, expected or Expected(), allow, remedy)
        # A record keeps last_hidden of the valid anchors, so the index already says how many there are.
        self.samples = [
            SampleInfo(row.sample_id, row.domain, row.tokens, row.label_rows) for row in self.store.records
        ]
        self.documents: Sequence[Sample] = StoredMasks(self.store)
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices`` in ``dtype`` if one was given, else as stored (scaled codecs: float32).

        The next ones are brought into memory and checked while the first ones are decoded.
        """
        return self.store.read_ahead(indices, self._dtype)

    def get_stored(self, indices: Sequence[int]) -> list[StoredSample]:
        """The same as they lie in the store, nothing copied: collate decodes them into a pack, or a GPU does."""
        return self.store.read_stored(indices, self._dtype)


class OnlineFeatures:
    """Hidden states computed when asked for: no disk, one target forward per call."""

    def __init__(self, target: HiddenStateModel, samples: Sequence[Sample], *, token_budget: int = 8192,
                 dtype: Optional[torch.dtype] = None) -> None:
        self._target, self.documents = target, samples
        self._budget, self._dtype = token_budget, dtype
        self.samples = [SampleInfo(item.sample_id, item.domain, len(item.input_ids)) for item in samples]

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices``, hidden states on the target's device, at most ``token_budget`` per forward."""
        result = []
        for chunk in token_batches([self.samples[index].length for index in indices], self._budget):
            documents = [self.documents[indices[position]] for position in chunk]
            result += encode_samples(self._target, documents, self._dtype)
        return result


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions cut into runs of at most ``budget`` tokens, order kept; a longer sample runs alone."""
    batches: list[list[int]] = []
    used = 0
    for position, length in enumerate(lengths):
        if not batches or used + length > budget:
            batches.append([])
            used = 0
        batches[-1].append(position)
        used += length
    return batches


def encode_samples(target: HiddenStateModel, documents: Sequence[Sample],
                   dtype: Optional[torch.dtype] = None) -> list[FeatureSample]:
    """One forward of the target over documents laid end to end."""
    lengths = [len(document.input_ids) for document in documents]
    encoded = target.encode(torch.cat([document.input_ids for document in documents]).to(target.device), lengths)
    features = encoded.features if dtype is None else encoded.features.to(dtype)
    last_hidden = encoded.last_hidden if dtype is None else encoded.last_hidden.to(dtype)
    return [
        FeatureSample(document, rows, last_rows)
        for document, rows, last_rows in zip(documents, features.split(lengths), last_hidden.split(lengths))
    ]
