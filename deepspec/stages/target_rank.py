"""features=disaggregated, the target ranks' side: the frozen target answers the trainers until they are done."""

import logging

from deepspec import distributed
from deepspec.config.paths import model_cache
from deepspec.config.schema import Config
from deepspec.data.sources import OnlineFeatures
from deepspec.data.stream_server import FeatureServer
from deepspec.stages.feature_sources import compute_dtype, rendered_samples
from deepspec.stages.streamed import CONNECT_SECONDS, common_identity
from deepspec.targets.head import load_head
from deepspec.targets.load import load_target
from deepspec.training.signals import Requests

log = logging.getLogger(__name__)
_IDLE_SECONDS = 6 * 3600.0  # without a request: trainers decode, validate and write checkpoints in between


def serve(config: Config, split: distributed.Split) -> None:
    """What a target rank does: wait for training, load the target, answer until the trainers are done.

    A signal makes the trainers save and stop, which ends this, too. Raises UserError when a trainer is gone.
    """
    if split.wait("open", "over") == "over":
        return
    with Requests() as requests:
        try:
            target = load_target(config.target, device=distributed.device(), cache_dir=model_cache(config))
            samples = rendered_samples(config, target)
            head = load_head(config.target, device="cpu", cache_dir=model_cache(config))
            split.tell(f"ready-{split.rank}", common_identity(config, head.fingerprint, samples))
            del head
            budget, width = config.features.token_budget, target.spec.hidden_size
            dtype = compute_dtype(config)
            sources = [OnlineFeatures(target, part, token_budget=budget, dtype=dtype) for part in samples]
            log.info("target rank %d: %s is loaded, waiting for %d trainers", split.rank, target.name, split.trainers)
            FeatureServer(split.connect(CONNECT_SECONDS), split.trainers, sources, dtype=dtype, hidden_width=width,
                          feature_width=width * len(target.feature_layers), stopping=lambda: requests.stop,
                          idle_seconds=_IDLE_SECONDS).run()
        except Exception as error:
            split.tell(f"failed-{split.rank}", f"{type(error).__name__}: {error}")
            raise
