"""features=hybrid: training fills the feature store in its first epoch and reads it afterwards."""

from typing import Callable

import torch

from deepspec import artifacts, distributed
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.feature_shards import FeatureWriter
from deepspec.data.hybrid import Filler, GrowingStore, HybridFeatures
from deepspec.data.sources import CachedFeatures
from deepspec.stages.features import finish_store, open_store, plan_store, store_fingerprint
from deepspec.targets.frozen import FrozenTarget


def store_is_finished(config: Config) -> bool:
    """Whether the store of these options is complete, so that there is nothing to fill. Collective."""
    directory = paths.features_dir(config)
    responses = artifacts.require_complete(paths.responses_dir(config), "Responses", "data_prep/generate_responses.py")
    fingerprint = store_fingerprint(config, responses)
    return bool(distributed.broadcast_object(
        distributed.is_main() and artifacts.is_complete(directory, fingerprint)))


def filling_features(config: Config, target: FrozenTarget, dtype: torch.dtype, opened: Callable[[str], CachedFeatures]
                     ) -> tuple[list[HybridFeatures], str, Callable[[bool], None]]:
    """Sources by split, the fingerprint of the store they fill, and what to call when training has ended.

    ``opened`` gives a split of the finished store. What is called at the end finishes the store if the first epoch is
    over, else it keeps what there is for the next run. All of it is collective. Raises InputRefused when the disk
    cannot hold the store, or another job is filling it.
    """
    build = plan_store(config, target)
    meeting = open_store(build)
    writer = FeatureWriter(build.directory, build.header, shard_bytes=config.features.shard_megabytes * 2**20,
                           rank=distributed.rank())

    def complete(tokens: int, seconds: float) -> None:
        distributed.barrier()  # every rank's shards are finished
        finish_store(build, target, meeting, tokens=tokens, seconds=seconds)

    filler = Filler(target, GrowingStore(build.directory, build.header, writer), complete, opened)
    distributed.barrier()  # no rank begins a shard before all have seen what was there
    sources = [
        HybridFeatures(filler, split, samples, token_budget=config.features.token_budget, dtype=dtype)
        for split, samples in build.work.sets.items()
    ]

    def done(first_epoch_over: bool) -> None:
        if first_epoch_over and sources[0].filling:
            filler.finish()
        elif sources[0].filling:
            filler.store.seal()
            meeting.end()

    return sources, build.fingerprint, done
