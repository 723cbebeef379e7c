"""Analytic acceptance on held-out samples while training: the same definition as in metrics.jsonl, per domain."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Sequence

import torch

from deepspec import distributed
from deepspec.config.schema import ObjectiveConfig, TrainerConfig
from deepspec.data.order import micro_steps
from deepspec.drafters.types import DrafterShape
from deepspec.objective import Denominators
from deepspec.tracking import Tracker
from deepspec.training.metrics import VALIDATION, MetricsFile, Sums, objective_row
from deepspec.training.packs import Packer, Source, to_device

logger = logging.getLogger(__name__)
PROXY = "acceptance_length_proxy"
EPOCH = -1  # anchors of validation are drawn once and for all


def choose(domains: Sequence[str], limit: int) -> list[int]:
    """Up to ``limit`` sample indices, the same number from each domain as far as it has them; 0 takes all."""
    turn: Counter[str] = Counter()
    rounds = []
    for index, domain in enumerate(domains):
        rounds.append((turn[domain], index))
        turn[domain] += 1
    chosen = [index for _, index in sorted(rounds)]
    return sorted(chosen[:limit] if limit else chosen)


@dataclass(frozen=True)
class Validator:
    """Callable the trainer runs on all ranks; each sample is counted exactly once, on whichever rank has it."""

    packer: Packer
    indices: tuple[int, ...]
    metrics: MetricsFile
    tracker: Tracker

    def __call__(self, engine: Any, step: int) -> None:
        """Measure, and append one row to validation.jsonl. The engine is back in training mode afterwards."""
        domains = [self.packer.source.samples[index].domain for index in self.indices]
        names = sorted(set(domains))
        domain_of = dict(zip(self.indices, domains, strict=True))
        engine.eval()
        try:
            with torch.no_grad():
                sums = self._measure(engine, domain_of, names)
        finally:
            engine.train()
        values, _ = sums.reduce()
        row = self._row(values, names, Counter(domains), step)
        self.metrics.append(row)
        flat = {f"eval/{name}/{PROXY}": row["domains"][name][PROXY] for name in names}
        self.tracker.log({f"eval/{PROXY}": row[PROXY], **flat}, step)
        logger.info("validation at step %d: acceptance length %.3f (analytic; %s)", step, row[PROXY],
                    ", ".join(f"{name} {value:.3f}" for name, value in zip(names, flat.values())))

    def _measure(self, engine: Any, domain_of: dict[int, str], names: Iterable[str]) -> Sums:
        steps = micro_steps(list(self.indices), rank=distributed.rank(), world_size=distributed.world_size(),
                            micro_batch_size=1)
        sums = Sums()
        for step in steps:
            batch = to_device(self.packer.pack(step, EPOCH), distributed.device())
            _, values = engine(batch, Denominators(1.0, 1.0, 1.0))
            own = "" if step.weightless else domain_of[step.indices[0]]
            for name in names:  # every rank adds every domain, so that the reduction lines up
                sums.add({f"{name}/{key}": value if name == own else torch.zeros_like(value)
                          for key, value in values.items()})
        return sums

    def _row(self, values: dict[str, list[float]], names: Sequence[str], counts: Counter, step: int) -> dict[str, Any]:
        keys = [key.removeprefix(f"{names[0]}/") for key in values if key.startswith(f"{names[0]}/")]
        parts = {name: {key: values[f"{name}/{key}"] for key in keys} for name in names}
        pooled = {key: [sum(column) for column in zip(*(parts[name][key] for name in names), strict=True)]
                  for key in parts[names[0]]}
        objective = self.packer.objective
        return {
            "step": step, "num_samples": len(self.indices), **objective_row(pooled, objective),
            "domains": {name: {"num_samples": counts[name], **objective_row(parts[name], objective)} for name in names},
        }


def make_validator(source: Source, shape: DrafterShape, trainer: TrainerConfig, objective: ObjectiveConfig, *,
                   seed: int, run_dir: Path, tracker: Tracker) -> Validator:
    """Validator on up to ``trainer.validation_samples`` samples of ``source``."""
    indices = choose([sample.domain for sample in source.samples], trainer.validation_samples)
    packer = Packer(source, shape, replace(trainer, micro_batch_size=1), objective, seed=seed)
    return Validator(packer, tuple(indices), MetricsFile(Path(run_dir) / VALIDATION), tracker)
