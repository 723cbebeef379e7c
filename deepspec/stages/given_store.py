"""Training on a store that was there before the run (features.path): imported, or made elsewhere."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Optional, Sequence, TypeVar

import torch

from deepspec.data.batch import FeatureSample
from deepspec.data.encoded import StoredSample
from deepspec.data.feature_format import read_header
from deepspec.data.features.cache import SOURCE, split_of
from deepspec.data.features.importing import UNCHECKED
from deepspec.data.samples import TokenRun, check_ids
from deepspec.data.sources import CachedFeatures, Expected
from deepspec.data.subset import Subset
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)
# The store is somebody else's: nobody is told to delete it.
REMEDY = ("Choose the target, layers and template it was made of, or another store as features.path. A difference that "
          "is meant is listed in features.allow.")
_Item = TypeVar("_Item", FeatureSample, StoredSample)
GivenSplit = CachedFeatures | Subset


class GivenFeatures(CachedFeatures):
    """A split of a store whose token ids nobody has compared with this target yet: that is done as they are read.

    ``get`` and ``get_stored`` raise InputRefused for an id outside ``vocab_size`` and for ``mask_token_id``.
    """

    def __init__(self, directory: Path, *, vocab_size: Optional[int] = None, mask_token_id: Optional[int] = None,
                 **options: Any) -> None:
        super().__init__(directory, **options)
        self._check = partial(check_ids, where=str(directory), vocab_size=vocab_size, mask_token_id=mask_token_id)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """As CachedFeatures.get."""
        return [self._checked(item) for item in super().get(indices)]

    def get_stored(self, indices: Sequence[int]) -> list[StoredSample]:
        """As CachedFeatures.get_stored."""
        return [self._checked(item) for item in super().get_stored(indices)]

    def _checked(self, item: _Item) -> _Item:
        sample = item.sample
        self._check(TokenRun(sample.sample_id, sample.domain, sample.input_ids.numpy(), sample.loss_mask.numpy()))
        return item


def given_features(directory: Path, expected: Expected, allow: frozenset[str], *, held_out_fraction: float,
                   target_dtype: Optional[str] = None, max_length: Optional[int] = None,
                   dtype: Optional[torch.dtype] = None, vocab_size: Optional[int] = None,
                   mask_token_id: Optional[int] = None) -> tuple[GivenSplit, GivenSplit, str]:
    """Training samples, held-out samples, fingerprint of both.

    Target, layers and convention are compared as for a store of our own. What an imported store cannot know (how its
    text was rendered, of which responses it is) is not, with a warning. A store that holds out nothing is split here,
    by the hash of the samples' ids: a sample never changes sides. Raises InputRefused for a store of something else.
    """
    manifest, header = read_header(directory)
    if SOURCE in manifest.config:
        expected = replace(expected, renderer_hash=None, responses_fingerprint=None)
        log.warning("features: %s was imported from a cache of %s, which does not say how its text was rendered or "
                    "which answers it holds: neither can be compared with this run's renderer and responses", directory,
                    manifest.config[SOURCE]["format"])
    if header.target_fingerprint == UNCHECKED and "target_fingerprint" not in allow:
        raise InputRefused(f"{directory} was imported without looking at any target, so nobody knows whose hidden "
                           "states it has. Import it again with --target FOLDER, or take it on trust with "
                           "features.allow=[target_fingerprint].")
    if target_dtype is not None and header.source_dtype != target_dtype:
        log.warning("features: %s has hidden states in %s, but target.dtype=%s: training starts from other rounding "
                    "than the target of this run has", directory, header.source_dtype, target_dtype)
    opened = partial(GivenFeatures, directory, expected=expected, dtype=dtype, allow=allow, remedy=REMEDY,
                     vocab_size=vocab_size, mask_token_id=mask_token_id)
    train, held_out = opened(split="train"), opened(split="held_out")
    if not len(train):
        raise InputRefused(f"{directory} has no samples to train on, {len(held_out)} are held out there.")
    longest = max(info.length for part in (train, held_out) for info in part.samples)
    if max_length is not None and longest > max_length:
        log.warning("features: %s has samples of up to %d tokens, which data.max_length=%d does not cut: hidden states "
                    "are used as they are stored", directory, longest, max_length)
    if len(held_out) or not held_out_fraction:
        return train, held_out, manifest.fingerprint
    parts = [Subset(train, partial(_belongs, split, held_out_fraction)) for split in ("train", "held_out")]
    log.info("features: %s holds out no samples; %d of %d are held out now, by the hash of their ids "
             "(features.held_out_fraction=%g)", directory, len(parts[1]), len(train), held_out_fraction)
    if not len(parts[0]):
        raise InputRefused(f"{directory}: the hash of their ids holds out all {len(train)} samples with "
                           f"features.held_out_fraction={held_out_fraction}. Lower it, or set it to 0.")
    return parts[0], parts[1], f"{manifest.fingerprint}:{held_out_fraction}"


def _belongs(split: str, fraction: float, sample_id: str) -> bool:
    return split_of(sample_id, fraction) == split
