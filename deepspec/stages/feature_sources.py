"""Where the samples of training come from in each features.mode: one loader per mode, chosen by name."""

from typing import Callable, Mapping, NamedTuple, Optional, Sequence

import torch

from deepspec.artifacts import canonical_hash, read_manifest
from deepspec.config.paths import features_dir, responses_dir
from deepspec.config.schema import Config
from deepspec.data.batch import Sample
from deepspec.data.rendering import Renderer
from deepspec.data.samples import SampleSet, load_samples
from deepspec.data.sources import CachedFeatures, Expected, FeatureSource, OnlineFeatures
from deepspec.errors import ConfigError
from deepspec.targets.frozen import FrozenTarget

SPLITS = ("train", "held_out")


class Data(NamedTuple):
    """Samples with hidden states; ``documents`` are the training ones without, where they are at hand."""

    train: FeatureSource
    documents: Optional[Sequence[Sample]]
    held_out: FeatureSource
    fingerprint: str


def load_data(config: Config, target: FrozenTarget) -> Data:
    """Training and held-out samples, from a store or through the target. Raises InputRefused for wrong ones."""
    if config.features.mode not in LOADERS:
        raise ConfigError(f"features.mode={config.features.mode!r} must be one of {', '.join(LOADERS)}.")
    return LOADERS[config.features.mode](config, target)


def needs_whole_target(config: Config) -> bool:
    """Whether training itself runs the target; else it needs two of its matrices only."""
    return config.features.mode in RUN_THE_TARGET


def compute_dtype(config: Config) -> torch.dtype:
    """What hidden states are handed to the drafter in."""
    return torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32


def responses_fingerprint(config: Config) -> Optional[str]:
    """Hash of the content of the responses; None while they are not finished."""
    responses = read_manifest(responses_dir(config))
    return canonical_hash(responses.files) if responses is not None and responses.status == "complete" else None


def expected_features(config: Config, target: FrozenTarget) -> Expected:
    """What a store must hold to be of this run."""
    renderer = Renderer(target.tokenizer, config.target.thinking, config.target.name)
    return Expected(target_fingerprint=target.fingerprint, layers=tuple(config.target.feature_layers),
                    renderer_hash=renderer.hash, responses_fingerprint=responses_fingerprint(config))


def rendered_samples(config: Config, target: FrozenTarget) -> list[SampleSet]:
    """Token ids and loss masks of the responses, by split."""
    return [
        load_samples(responses_dir(config), split, config.data.max_length, vocab_size=target.spec.vocab_size,
                     mask_token_id=config.target.mask_token_id) for split in SPLITS
    ]


def _cached(config: Config, target: FrozenTarget) -> Data:
    expected, dtype = expected_features(config, target), compute_dtype(config)
    stores = [CachedFeatures(features_dir(config), split=split, expected=expected, dtype=dtype) for split in SPLITS]
    return Data(stores[0], None, stores[1], stores[0].store.manifest.fingerprint)


def _online(config: Config, target: FrozenTarget) -> Data:
    samples = rendered_samples(config, target)
    budget, dtype = config.features.token_budget, compute_dtype(config)
    sources = [OnlineFeatures(target, part, token_budget=budget, dtype=dtype) for part in samples]
    return Data(sources[0], samples[0], sources[1],
                f"online:{responses_fingerprint(config)}:{config.data.max_length}")


LOADERS: Mapping[str, Callable[[Config, FrozenTarget], Data]] = {"cached": _cached, "online": _online}
RUN_THE_TARGET = frozenset({"online"})
