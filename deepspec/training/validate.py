"""Held-out acceptance while training, per domain: analytic, as in metrics.jsonl, and now and then of real decoding."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence

import torch

from deepspec import distributed
from deepspec.config.schema import ObjectiveConfig, TrainerConfig
from deepspec.data.order import micro_steps
from deepspec.drafters.types import DrafterShape
from deepspec.objective import Denominators
from deepspec.tracking import Tracker
from deepspec.training.live_decode import LiveDecoder
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
    decoder: Optional[LiveDecoder] = None

    def __call__(self, engine: Any, step: int, averaged: Optional[Any] = None) -> float:
        """Measure, append one row to validation.jsonl, and return the pooled acceptance length (analytic).

        ``averaged``, called like the engine, has the averaged weights: the row then holds their values under ``ema``,
        and theirs is the length returned. The same value on all ranks. The engine is left in the mode it was in.
        """
        domains = [self.packer.source.samples[index].domain for index in self.indices]
        names = sorted(set(domains))
        row = {"step": step, **self._values(engine, domains, names)}
        if averaged is not None:
            row["ema"] = self._values(averaged, domains, names)
        flat = {f"eval/{name}/{PROXY}": row["domains"][name][PROXY] for name in names}
        logger.info("validation at step %d: acceptance length %.3f (analytic; %s)%s", step, row[PROXY],
                    ", ".join(f"{name} {value:.3f}" for name, value in zip(names, flat.values())),
                    f"; averaged weights {row['ema'][PROXY]:.3f}" if "ema" in row else "")
        tracked = {f"eval/{PROXY}": row[PROXY], **flat}
        if self.decoder is not None and self.decoder.due(step):
            row["decoded"] = self.decoder(engine, step)
            parts = {"": row["decoded"], **{f"{name}/": part for name, part in row["decoded"]["domains"].items()}}
            tracked |= {f"eval/decoded/{name}acceptance_length": part["acceptance_length"]
                        for name, part in parts.items() if part["acceptance_length"] is not None}
        self.metrics.append(row)
        if averaged is not None:
            tracked[f"eval/ema/{PROXY}"] = row["ema"][PROXY]
        self.tracker.log(tracked, step)
        return float(row.get("ema", row)[PROXY])

    def _values(self, engine: Any, domains: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        training = engine.training
        engine.eval()
        try:
            with torch.no_grad():
                sums = self._measure(engine, dict(zip(self.indices, domains, strict=True)), names)
        finally:
            engine.train(training)
        values, _ = sums.reduce()
        return self._row(values, names, Counter(domains))

    def _measure(self, engine: Any, domain_of: dict[int, str], names: Iterable[str]) -> Sums:
        steps = micro_steps(list(self.indices), rank=distributed.rank(), world_size=distributed.world_size(),
                            micro_batch_size=1)
        self.packer.announce(steps)
        sums = Sums()
        for step in steps:
            batch = to_device(self.packer.pack(step, EPOCH), distributed.device())
            _, values = engine(batch, Denominators(1.0, 1.0, 1.0))
            own = "" if step.weightless else domain_of[step.indices[0]]
            for name in names:  # every rank adds every domain, so that the reduction lines up
                sums.add({f"{name}/{key}": value if name == own else torch.zeros_like(value)
                          for key, value in values.items()})
        return sums

    def _row(self, values: dict[str, list[float]], names: Sequence[str], counts: Counter) -> dict[str, Any]:
        keys = [key.removeprefix(f"{names[0]}/") for key in values if key.startswith(f"{names[0]}/")]
        parts = {name: {key: values[f"{name}/{key}"] for key in keys} for name in names}
        pooled = {key: [sum(column) for column in zip(*(parts[name][key] for name in names), strict=True)]
                  for key in parts[names[0]]}
        objective = self.packer.objective
        return {
            "num_samples": len(self.indices), **objective_row(pooled, objective),
            "domains": {name: {"num_samples": counts[name], **objective_row(parts[name], objective)} for name in names},
        }


def make_validator(source: Source, shape: DrafterShape, trainer: TrainerConfig, objective: ObjectiveConfig, *,
                   seed: int, run_dir: Path, tracker: Tracker, decoder: Optional[LiveDecoder] = None) -> Validator:
    """Validator on up to ``trainer.validation_samples`` samples of ``source``, which also runs ``decoder``."""
    indices = choose([sample.domain for sample in source.samples], trainer.validation_samples)
    packer = Packer(source, shape, replace(trainer, micro_batch_size=1, pack_tokens=None), objective, seed=seed)
    return Validator(packer, tuple(indices), MetricsFile(Path(run_dir) / VALIDATION), tracker, decoder)
