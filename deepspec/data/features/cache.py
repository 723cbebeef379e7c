"""Caches made by other projects, seen as samples in our convention. T tokens, M layers, D width."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, Sequence

import torch
from torch import Tensor

from deepspec import artifacts
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.mixture import hash_fraction
from deepspec.errors import ConfigError, InputRefused

SOURCE = "imported"  # key of the manifest's config
FORMATS = ("deepspec", "speculators", "specforge")


@dataclass(frozen=True)
class SourceOptions:
    """What an imported store remembers of its origin, enough to read it again."""

    format: str
    directory: str
    layers: Optional[tuple[int, ...]] = None  # in the cache's own convention; None where the cache says it
    target: Optional[str] = None  # folder
    dtype: str = "bfloat16"  # of the target
    domain: str = "imported"
    held_out: float = 0.02  # share of the samples, by the hash of their id

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"layers": list(self.layers) if self.layers is not None else None}


def options_from_json(values: dict[str, Any]) -> SourceOptions:
    """Options as they were written."""
    return SourceOptions(**(values | {"layers": tuple(values["layers"]) if values["layers"] else None}))


class ForeignCache(Protocol):
    """A cache of another project. ``layers`` are output ids (ours), whatever the cache calls them."""

    directory: Path
    layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    fingerprint: str
    stored_bytes: int

    def __len__(self) -> int: ...

    def sample_id(self, index: int) -> str:
        """A name that stays the same when the cache grows."""
        ...

    def read(self, index: int) -> FeatureSample:
        """Features [T, M*D], last_hidden [T, D] after the final norm. Raises InputRefused naming the file."""
        ...


Normalise = Callable[[Tensor], Tensor]  # the target's final norm, [T, D] -> [T, D]


def open_cache(options: SourceOptions, normalise: Optional[Normalise]) -> ForeignCache:
    """The cache ``options`` describe. Raises InputRefused where it is not one of that format."""
    from deepspec.data.features.from_deepspec import DeepSpecCache
    from deepspec.data.features.from_specforge import SpecForgeCache
    from deepspec.data.features.from_speculators import SpeculatorsCache

    directory = Path(options.directory)
    if not directory.is_dir():
        raise InputRefused(f"{directory} is not a folder.")
    if options.format == "deepspec":
        if options.layers is not None:
            raise ConfigError("--layers is not for DeepSpec's caches: their manifest says which layers they hold.")
        return DeepSpecCache(directory, options.domain)
    if not options.layers:
        raise ConfigError(f"A cache of {options.format} does not say which layers it holds: give --layers with the ids "
                          "it was made with.")
    if options.format == "specforge":
        return SpecForgeCache(directory, options.domain, options.layers)
    if options.format == "speculators":
        if normalise is None:
            raise ConfigError("A cache of speculators holds the last hidden state before the final norm: give --target "
                              "with the folder of the model, whose norm is applied.")
        return SpeculatorsCache(directory, options.domain, options.layers, normalise)
    raise ConfigError(f"format {options.format!r} is not known. Use one of: {', '.join(FORMATS)}.")


def split_of(sample_id: str, held_out: float) -> str:
    """``train`` or ``held_out`` by the hash of the id alone."""
    return "held_out" if hash_fraction("split", sample_id) < held_out else "train"


def make_sample(where: str, sample_id: str, domain: str, input_ids: Tensor, loss_mask: Tensor) -> Sample:
    """Ids [T] and mask [T] of any integer type. Raises InputRefused for other shapes, negative ids, odd masks."""
    if input_ids.dim() != 1 or len(input_ids) == 0 or input_ids.shape != loss_mask.shape:
        raise InputRefused(f"{where}: {tuple(input_ids.shape)} token ids and {tuple(loss_mask.shape)} mask entries; "
                           "both must be flat, of one length and not empty.")
    if int(input_ids.min()) < 0:
        raise InputRefused(f"{where}: token id {int(input_ids.min())} is negative.")
    if not bool(((loss_mask == 0) | (loss_mask == 1)).all()):
        raise InputRefused(f"{where}: the loss mask has values other than 0 and 1.")
    return Sample(sample_id, domain, input_ids.to(torch.int64), loss_mask.to(torch.bool))


def check_rows(where: str, sample: Sample, features: Tensor, last_hidden: Tensor, layers: int) -> FeatureSample:
    """Raise InputRefused unless there is one row per token, none fewer, and ``layers`` equal columns."""
    tokens, width = len(sample.input_ids), last_hidden.shape[-1]
    if features.shape != (tokens, layers * width) or last_hidden.shape != (tokens, width):
        raise InputRefused(
            f"{where}: {tokens} tokens, but hidden states of shape {tuple(features.shape)} and "
            f"{tuple(last_hidden.shape)}; expected {(tokens, layers * width)} for {layers} layers, {(tokens, width)}."
        )
    return FeatureSample(sample, features, last_hidden)


def fingerprint_files(paths: Sequence[Path], root: Path) -> str:
    """Hash of names and sizes: contents are checked when they are read, and may be terabytes."""
    return artifacts.canonical_hash([[str(path.relative_to(root)), path.stat().st_size] for path in paths])


def dtype_name(dtype: torch.dtype) -> str:
    """For example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
