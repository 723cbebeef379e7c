"""What a feature store holds: header, records, sizes and the check that its numbers are usable."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence

import torch

from deepspec import artifacts
from deepspec.data import feature_codec as codecs
from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import Sample
from deepspec.errors import InputRefused

INDEX = "index.jsonl"
PRODUCER = "features"
CONVENTION = "layer i = output of decoder layer i (HF hidden_states[i+1]); last_hidden after the final norm"
STREAMS = "; a layer's output is the mean of its residual streams, the last layer's before they are weighed"
COMMAND = "data_prep/extract_features.py"
STORE_VERSION = 2  # 1 had CRC-32 checksums
# A norm squares its input: anything larger overflows float32 there although it is still finite here.
LARGEST_MAGNITUDE = 1e18


def convention_of(streams: bool) -> str:
    """What layer ids and hidden states mean; ``streams``: of a target with several residual streams (DeepSeek-V4)."""
    return CONVENTION + STREAMS if streams else CONVENTION


@dataclass(frozen=True)
class StoreHeader:
    """What the features are of. Two stores with equal headers hold interchangeable numbers."""

    target_fingerprint: str
    renderer_hash: str
    responses_fingerprint: str
    layers: tuple[int, ...]
    hidden_size: int
    codec: str  # one of feature_codec.CODECS
    source_dtype: str  # of the target's arithmetic
    convention: str = CONVENTION
    store_version: int = STORE_VERSION

    def layout(self, tokens: int, label_rows: int, coded: Sequence[int] = ()) -> codecs.Layout:
        """Byte layout of one sample; ``coded`` are the sizes of its entropy-coded parts, if it has any."""
        return codecs.layout(self.codec, tokens=tokens, label_rows=label_rows, layers=len(self.layers),
                             width=self.hidden_size, coded=coded)

    def to_json(self) -> dict[str, Any]:
        """Plain values, the same before and after a round trip through JSON."""
        return asdict(self) | {"layers": list(self.layers)}


@dataclass(frozen=True)
class Record:
    """One line of an index."""

    sample_id: str
    domain: str
    split: str
    shard: str
    offset: int
    tokens: int
    label_rows: int
    xxh3: str  # 64 bits as 16 hex digits, over all bytes of the sample
    coded: tuple[int, ...] = ()  # bytes of the entropy-coded parts of features and last hidden; lossless only

    def to_json(self) -> dict[str, Any]:
        """The line of an index; what is empty is left out."""
        values = asdict(self) | {"coded": list(self.coded)}
        return values if self.coded else {name: value for name, value in values.items() if name != "coded"}


def record_from_json(values: dict[str, Any]) -> Record:
    """Record as it was written."""
    return Record(**(values | {"coded": tuple(values.get("coded", ()))}))


class BadFeatures(InputRefused):
    """Hidden states that are not numbers a drafter can learn from."""


def estimate_bytes(header: StoreHeader, samples: Iterable[Sample]) -> int:
    """Bytes of the store on disk, shard lists and index included (about 400 bytes per sample).

    What lossless coding saves is assumed: feature_codec.ASSUMED_LOSSLESS_SHARE.
    """
    total = 0
    for sample in samples:
        rows = int(valid_anchors(sample.loss_mask).numel())
        total += header.layout(len(sample.input_ids), rows).size + 2 * (150 + len(sample.sample_id.encode()))
    return total


def describe_estimate(header: StoreHeader, needed: int) -> str:
    """The estimate as printed, with what it takes for granted."""
    assumed = ""
    if header.codec == "lossless":
        assumed = f" (assuming {codecs.ASSUMED_LOSSLESS_SHARE:.0%} of bf16's bytes)"
    return f"about {human_bytes(needed)} as {header.codec}{assumed}"


def require_disk(directory: Path, needed: int) -> None:
    """Raise InputRefused when the disk of ``directory`` cannot take ``needed`` more bytes."""
    existing = next(folder for folder in (directory, *directory.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise InputRefused(
            f"The features need about {human_bytes(needed)} but {existing} has {human_bytes(free)} free. Use "
            f"features.codec=int8 (half of bf16), features.mode=online (no cache), fewer prompts (data.max_prompts) "
            f"or another disk (run.data_root)."
        )


def human_bytes(count: float) -> str:
    """For example ``3.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def check_finite(header: StoreHeader, sample_id: str, features: torch.Tensor, last_hidden: torch.Tensor) -> None:
    """Raise BadFeatures naming the sample and the layer of a NaN, an infinity or an absurd magnitude."""
    if usable(features) and usable(last_hidden):
        return
    per_layer = features.reshape(len(features), len(header.layers), -1)
    named = [(f"layer {layer}", per_layer[:, index]) for index, layer in enumerate(header.layers)]
    for name, values in [*named, ("last_hidden", last_hidden)]:
        wrong = ~(values.abs() <= LARGEST_MAGNITUDE)  # also true for NaN
        if bool(wrong.any()):
            row, channel = (int(number) for number in torch.nonzero(wrong)[0])
            raise BadFeatures(
                f"sample {sample_id!r}, {name}: value {values[row, channel].item()} at token {row}, channel {channel}. "
                f"If the target overflows in its dtype, use target.dtype=float32."
            )


def usable(values: torch.Tensor) -> bool:
    """One pass without a copy; a NaN makes both extremes NaN and the comparisons false."""
    if values.numel() == 0:
        return True
    low, high = torch.aminmax(values)
    return bool((low >= -LARGEST_MAGNITUDE) & (high <= LARGEST_MAGNITUDE))


def read_header(directory: Path) -> tuple[artifacts.Manifest, StoreHeader]:
    """Manifest and header of a finished store."""
    manifest = artifacts.require_complete(directory, "Features", COMMAND)
    if manifest.producer != PRODUCER or "header" not in manifest.facts:
        raise InputRefused(f"{directory} was made by stage {manifest.producer!r}, expected {PRODUCER!r}.")
    return manifest, header_of(directory, manifest)


def header_of(directory: Path, manifest: artifacts.Manifest) -> StoreHeader:
    """The header in a store's manifest. Raises InputRefused for one of another version or nonsense."""
    values = manifest.facts.get("header")
    version = values.get("store_version") if isinstance(values, dict) else None
    if version != STORE_VERSION:
        raise InputRefused(f"{directory} has store_version {version}, this code reads {STORE_VERSION}. "
                           f"Delete it and make the features again with: {COMMAND}")
    shards = manifest.facts.get("shards", {} if manifest.status != "complete" else None)
    assert isinstance(values, dict)  # it had a version
    problem = _header_problem(values, shards)
    if problem is not None:
        raise InputRefused(f"{directory / artifacts.MANIFEST} does not describe a feature store: {problem}. Was it "
                           f"edited? Make the features again with: {COMMAND}, or import them again.")
    return header_from_json(values)


def _header_problem(values: dict[str, Any], shards: Any) -> Optional[str]:
    """What keeps a manifest from describing a store of this version."""
    names = set(StoreHeader.__dataclass_fields__)
    if values.keys() != names:
        return f"header has {', '.join(sorted(values.keys() ^ names))} too many or too few"
    layers, width = values["layers"], values["hidden_size"]
    good = {
        "layers": isinstance(layers, list) and bool(layers) and all(isinstance(layer, int) for layer in layers),
        "hidden_size": isinstance(width, int) and width > 0,
        "codec": values["codec"] in codecs.CODECS,
    }
    wrong = [f"{name}={values[name]!r}" for name, right in good.items() if not right]
    if not isinstance(shards, dict) or not all(
            isinstance(shard, dict) and {"bytes", "sha256"} <= shard.keys() for shard in shards.values()):
        wrong.append(f"shards={shards!r}")
    return ", ".join(wrong) or None


def header_from_json(values: dict[str, Any]) -> StoreHeader:
    """Header as it was written."""
    return StoreHeader(**(values | {"layers": tuple(values["layers"])}))
