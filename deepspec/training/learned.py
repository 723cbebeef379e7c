"""Which weights of the target the drafter learned from: acceptance depends on them, so later stages compare."""

import logging
from dataclasses import dataclass
from typing import Any, Optional

from deepspec.artifacts import read_manifest
from deepspec.config.paths import features_dir, reads_store
from deepspec.config.schema import Config
from deepspec.targets.quantization import same_quantization
from deepspec.targets.spec import TargetSpec

log = logging.getLogger(__name__)


def learned_from(config: Config) -> Optional[dict[str, Any]]:
    """What the run's features remember of the engine that made them: engine, model, quantization and more. None where
    the target itself made them here."""
    manifest = read_manifest(features_dir(config)) if reads_store(config) else None
    served = manifest.facts.get("served") if manifest is not None else None
    if served is None and config.features.mode == "server" and not config.features.server.store:
        server = config.features.server
        return {"engine": server.engine, "model": server.model, "quantization": server.quantization}
    return served


@dataclass(frozen=True)
class Quantization:
    """Of the weights whose hidden states the drafter learned from, and of those it meets now; None: not quantised."""

    features: Optional[str]
    target: Optional[str]

    @property
    def same(self) -> bool:
        """Whether acceptance on the one says what it is on the other."""
        return same_quantization(self.features, self.target)


def quantization_of(config: Config, spec: TargetSpec) -> Quantization:
    """Features computed here are of the target's own weights."""
    served = learned_from(config)
    return Quantization(spec.quantization if served is None else served.get("quantization"), spec.quantization)


def warn_of_another_engine(config: Config, spec: TargetSpec) -> None:
    """Say when the drafter learned from hidden states of weights that are not those that run here."""
    served, found = learned_from(config), quantization_of(config, spec)
    if served is None or found.same:
        return
    log.warning("the drafter was trained on hidden states of %s serving %s as %s; here the target runs as %s in %s, so "
                "that acceptance in that engine may differ from what is measured now", served["engine"],
                served["model"], found.features or "not quantised", found.target or "not quantised",
                config.target.dtype)
