"""One sample of a feature store as bytes, and back. T tokens, M layers, D width, n rows that predict a label."""

from dataclasses import replace
from typing import Optional

import numpy as np
import torch
import xxhash
from torch import Tensor

from deepspec.data import feature_codec as codecs
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.encoded import EncodedStates, StoredSample, StoredStates
from deepspec.data.feature_format import BadFeatures, Record, StoreHeader, check_finite, usable

Pieces = list[bytes | memoryview]


def encode_record(header: StoreHeader, sample: Sample, split: str, features: Tensor,
                  last_hidden: Tensor) -> tuple[Record, Pieces]:
    """Bytes of ``features [T, M*D]`` and of the rows of ``last_hidden [T, D]`` that predict a supervised label.

    The record still lacks shard and offset. Raises BadFeatures for a NaN or a wrong number of rows.
    """
    _check_shapes(header, sample, features, last_hidden)
    rows = valid_anchors(sample.loss_mask)
    needed = last_hidden[rows.to(last_hidden.device)]
    check_finite(header, sample.sample_id, features, needed)
    coded, pieces = _pieces(header, sample, features, needed)
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    record = Record(
        sample_id=sample.sample_id, domain=sample.domain, split=split, shard="", offset=0,
        tokens=len(sample.input_ids), label_rows=len(rows), xxh3=checksum.hexdigest(), coded=coded,
    )
    return record, pieces


def _check_shapes(header: StoreHeader, sample: Sample, features: Tensor, last_hidden: Tensor) -> None:
    tokens, width = len(sample.input_ids), header.hidden_size
    expected = ((tokens, len(header.layers) * width), (tokens, width))
    found = (tuple(features.shape), tuple(last_hidden.shape))
    if found != expected:
        raise BadFeatures(
            f"sample {sample.sample_id!r} has {tokens} tokens: features and last_hidden must be {expected}, found "
            f"{found}. A server that reuses cached prefixes returns fewer rows; switch its prefix caching off."
        )


def _pieces(header: StoreHeader, sample: Sample, features: Tensor, needed: Tensor) -> tuple[tuple[int, ...], Pieces]:
    """Sizes of what was entropy-coded, and the record's bytes in file order."""
    tokens = len(sample.input_ids)
    per_layer = features.detach().reshape(tokens, len(header.layers), -1)
    encoded = [*codecs.encode(per_layer, header.codec), *codecs.encode(needed.detach(), header.codec)]
    contents = [codecs.to_bytes(part.cpu()) for part in encoded]
    coded = (len(contents[1]), len(contents[3])) if header.codec == "lossless" else ()
    layout = header.layout(tokens, len(needed), coded)
    pieces: Pieces = []
    position = 0
    for section, content in (
        (layout.ids, sample.input_ids.numpy().astype(np.int32).tobytes()),
        (layout.mask, sample.loss_mask.numpy().astype(np.uint8).tobytes()),
        (layout.features, contents[0]),
        (layout.feature_extra, contents[1]),
        (layout.hidden, contents[2]),
        (layout.hidden_extra, contents[3]),
    ):
        assert len(content) == section.size, "layout and codec disagree"
        pieces += [bytes(section.offset - position), content]
        position = section.offset + section.size
    return coded, [piece for piece in (*pieces, bytes(layout.size - position)) if len(piece)]


def record_size(header: StoreHeader, record: Record) -> int:
    """Bytes of the sample."""
    return header.layout(record.tokens, record.label_rows, record.coded).size


def is_intact(header: StoreHeader, record: Record, raw: np.ndarray) -> bool:
    """Whether ``raw`` (uint8) is byte for byte what was written."""
    return len(raw) == record_size(header, record) and xxhash.xxh3_64_hexdigest(raw.data) == record.xxh3


def decode_record(header: StoreHeader, record: Record, raw: np.ndarray,
                  dtype: Optional[torch.dtype] = None) -> FeatureSample:
    """The sample in ``dtype`` (default: as stored); rows of last_hidden nobody needs are zero.

    ``raw`` must be intact. What needs no conversion is a view of it. Raises BadFeatures for a NaN.
    """
    return stored_record(header, record, raw, dtype).decoded()


def stored_record(header: StoreHeader, record: Record, raw: np.ndarray,
                  dtype: Optional[torch.dtype] = None) -> StoredSample:
    """The sample as it is stored, to be decoded to ``dtype`` later (default: bfloat16, or float32 if scaled).

    ``raw`` must be intact; nothing of it is copied, except that ``lossless`` is unpacked to bfloat16. Raises
    BadFeatures for a NaN.
    """
    layout = header.layout(record.tokens, record.label_rows, record.coded)
    sample = Sample(
        sample_id=record.sample_id, domain=record.domain,
        input_ids=torch.from_numpy(_section(raw, layout.ids).view(np.int32).astype(np.int64)),
        loss_mask=torch.from_numpy(_section(raw, layout.mask).astype(bool)),
    )
    width = header.hidden_size
    features = _states(header, raw, (layout.features, layout.feature_extra),
                       (record.tokens, len(header.layers), width), dtype)
    needed = _states(header, raw, (layout.hidden, layout.hidden_extra), (record.label_rows, 1, width), dtype)
    # Stored values are finite times their scale: usable scales are enough, and a hundredth of the numbers.
    if header.codec in codecs.SCALED and not (usable(features.scales) and usable(needed.scales)):
        check_finite(header, record.sample_id, features.decode(), needed.decode())
    elif header.codec not in codecs.SCALED:
        check_finite(header, record.sample_id, features.data, needed.data.flatten(1))
    last_hidden = replace(needed, length=record.tokens, rows=valid_anchors(sample.loss_mask))
    return StoredSample(sample, StoredStates(features, last_hidden))


def _states(header: StoreHeader, raw: np.ndarray, sections: tuple[codecs.Section, codecs.Section],
            shape: tuple[int, int, int], dtype: Optional[torch.dtype]) -> EncodedStates:
    """All rows of ``shape`` [R, M, D]."""
    groups = header.hidden_size // codecs.group_size(header.hidden_size)
    data = codecs.from_bytes(raw, sections[0], header.codec, shape)
    extra = codecs.extra_from_bytes(raw, sections[1], header.codec, (*shape[:-1], groups))
    if header.codec in codecs.SCALED:
        return EncodedStates(header.codec, data, extra, dtype or torch.float32, length=shape[0])
    codec, data = ("bf16", codecs.join_planes(data, extra)) if header.codec == "lossless" else (header.codec, data)
    return EncodedStates(codec, data, data.new_empty(*shape[:-1], 0), dtype or data.dtype, length=shape[0])


def _section(raw: np.ndarray, section: codecs.Section) -> np.ndarray:
    return raw[section.offset:section.offset + section.size]
