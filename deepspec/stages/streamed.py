"""features=disaggregated, the trainers' side: where hidden states come from target ranks of the same launch."""

import json
from typing import Callable, Sequence

import torch

from deepspec import distributed
from deepspec.artifacts import canonical_hash
from deepspec.config.schema import Config
from deepspec.data.batch import Sample
from deepspec.data.samples import SampleSet
from deepspec.data.stream import CHANNELS, Link, StreamedFeatures, agreement
from deepspec.errors import ConfigError

CONNECT_SECONDS = 1800.0  # for the slowest rank to load the target


def streamed_features(config: Config, target_fingerprint: str, samples: Sequence[SampleSet],
                      dtype: torch.dtype) -> tuple[list[StreamedFeatures], Callable[[], None]]:
    """A trainer's sources, one per split, and what says goodbye to the target ranks when training is over."""
    split = distributed.current_split()
    if split is None:
        raise ConfigError("features.mode=disaggregated needs a launch of several ranks: deepspeed --num_gpus N "
                          "launch/train_drafter.py ... with N above target.ranks.")
    agreement(split, common_identity(config, target_fingerprint, samples), CONNECT_SECONDS)
    link = Link(split.connect(CONNECT_SECONDS), split, config.features.queue_timeout)
    shape, layers = config.target.shape, len(config.target.feature_layers)
    sources = [
        StreamedFeatures(link, channel, part, layers=layers, hidden_size=shape.hidden_size, dtype=dtype,
                         depth=config.features.queue_depth)
        for channel, part in zip(CHANNELS, samples, strict=True)
    ]
    return sources, link.close


def common_identity(config: Config, target_fingerprint: str, samples: Sequence[Sequence[Sample]]) -> str:
    """What trainers and target ranks must have in common, short enough for a message."""
    contents = [[(item.sample_id, item.input_ids.tolist(), item.loss_mask.tolist()) for item in part]
                for part in samples]
    return json.dumps({
        "target": target_fingerprint[:16], "layers": list(config.target.feature_layers),
        "samples": [len(part) for part in samples], "contents": canonical_hash(contents, 16),
    })
