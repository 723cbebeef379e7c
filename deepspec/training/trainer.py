"""The training loop: windows of samples in, a drafter in checkpoints and one row of metrics per step out."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional

import torch

from deepspec import distributed
from deepspec.config.schema import Config
from deepspec.data.order import steps_per_epoch, windows
from deepspec.data.progress import Progress
from deepspec.drafters.base import Drafter
from deepspec.errors import UserError
from deepspec.tracking import Tracker
from deepspec.training import checkpoint, saving, state
from deepspec.training.ema import Outline, WeightAverage
from deepspec.training.engine import effective_stage, initialize
from deepspec.training.identity import require_same
from deepspec.training.loading import LoadedWindow, Loader
from deepspec.training.memory import peak_bytes, release_free_pages
from deepspec.training.metrics import METRICS, SHARES, VALIDATION, MetricsFile, objective_row, tracked
from deepspec.training.module import TrainingModule
from deepspec.training.packs import Packer, Window
from deepspec.training.retention import Best, better, exhausted, point_to_best, restored, stale_after
from deepspec.training.schedule import make_schedule
from deepspec.training.signals import Requests
from deepspec.training.step import StepResult, optimizer_step, prime, rehearse
from deepspec.training.writer import CheckpointWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How training ended."""

    step: int
    total_steps: int
    stopped: bool  # asked to stop by a signal; the checkpoint is written
    trained: bool  # false: the run was finished before, nothing was touched
    row: Mapping[str, Any]  # metrics of the last step


class DrafterTrainer:
    """Trains ``drafter`` on the windows of ``packer``; continues from the checkpoint that ``trainer.resume`` means.

    ``identity`` says what the run means (``identity.run_identity``). ``validate(engine, step)``, or with a module of
    averaged weights as a third argument where the run has them, is called by all ranks every ``validate_every`` and
    every ``decode_every`` steps and at the end; it returns the acceptance length that ``keep_best`` goes by, or None.
    """

    def __init__(self, drafter: Drafter, packer: Packer, config: Config, *, identity: Mapping[str, Any],
                 tracker: Optional[Tracker] = None,
                 validate: Optional[Callable[..., Optional[float]]] = None) -> None:
        self.config, self.packer, self.identity = config, packer, dict(identity)
        self.run_dir = Path(config.run.dir)
        self.tracker = tracker or Tracker()
        self.validate = validate
        self.metrics = MetricsFile(self.run_dir / METRICS)
        self.step = self.samples = self.skipped_steps = self.epoch = 0
        self.saved_at: Optional[int] = None
        self.best: Optional[Best] = None
        self.stale = 0  # validations in a row without progress
        self.average: Optional[WeightAverage] = None
        self.writer = CheckpointWriter(self.run_dir, packer.shape, config)
        self.bad_in_a_row = 0
        count = len(packer.source)
        if count < 1:
            raise UserError("There is no training sample. See the counts that responses and features printed.")
        self.per_epoch = steps_per_epoch(count, config.trainer.global_batch_size)
        self.total_steps = config.trainer.max_steps or config.trainer.epochs * self.per_epoch
        self.schedule = make_schedule(self.total_steps, config.optimizer)
        self._drafter = drafter
        self._outline: Optional[Outline] = None
        self.engine: Any = None

    def run(self) -> TrainResult:
        """Train to the last step, or to the end of the step in which SIGTERM arrives."""
        found = checkpoint.resolve_resume(self.config.trainer.resume, self.run_dir)
        if found is not None and self._finished(found):
            require_same(checkpoint.read_state(found).identity, self.identity, found)
            if distributed.is_main():
                saving.tidy(self.run_dir, found, self.config.trainer.keep_last)
            logger.info("training is finished (step %d of %d in %s): nothing to do",
                        checkpoint.read_state(found).step, self.total_steps, found)
            return TrainResult(checkpoint.read_state(found).step, self.total_steps, False, False, {})
        self._start(found)
        try:
            with Requests() as requests:  # until all is written: the signal may come more than once
                stopped, row = self._loop(requests)
                self.save()
                self.writer.settle()
        finally:
            self.writer.close()
        return TrainResult(self.step, self.total_steps, stopped, True, row)

    def _loop(self, requests: Requests) -> tuple[bool, dict[str, Any]]:
        """Steps until the last one or a request to stop. Returns whether there was one, and the last step's metrics."""
        row: dict[str, Any] = {}
        ahead = Loader(self.packer, self._windows(), self.packer.num_workers)
        shown = Progress("train", self.total_steps, "steps", done=self.step)
        with shown as progress, ahead as loader:
            for loaded in loader:  # one optimizer step
                result = self._optimizer_step(loaded, requests)
                row = self._row(result, time.perf_counter() - loaded.started)
                if self._due(self.config.trainer.log_every) or self.step == self.total_steps:
                    self._log(row)
                new_best = self._validation_due() and self._validate(loader)
                if new_best or result.save or self._due(self.config.trainer.save_every):
                    self.save()
                progress.add(result.tokens, note=_note(row))
                release_free_pages()
                if self._exhausted(self.step, self.stale):
                    logger.info("training ends at step %d of %d: the last %d validations were no better than that of "
                                "step %d; export.checkpoint=best takes that one", self.step, self.total_steps,
                                self.stale, self.best.step if self.best else 0)
                    return False, row
                if result.stop and self.step < self.total_steps:
                    requests.stop = True  # whichever rank was asked
                    return True, row
        return False, row

    def save(self) -> None:
        """Have a checkpoint of this step written, unless there is one. Collective.

        A failure of this write, or with ``trainer.async_save`` of the one before it, is raised on every rank.
        """
        if self.saved_at == self.step:
            return
        train_state = checkpoint.TrainState(
            step=self.step, total_steps=self.total_steps, epoch=self.epoch, samples=self.samples,
            skipped_steps=self.skipped_steps, adam_step=state.adam_step(self.engine),
            world_size=distributed.world_size(),
            zero_stage=effective_stage(self.config.engine.zero_stage, self.config.trainer.precision),
            identity=self.identity, tracking_id=self.tracker.id,
            best_step=self.best.step if self.best else None,
            best_acceptance=self.best.acceptance if self.best else None, stale_validations=self.stale,
        )
        self.writer.save(self.engine, self.average, train_state)
        self.saved_at = self.step

    def _validate(self, loader: Loader) -> bool:
        """Measure on the held-out samples. Returns whether a checkpoint of this step is to be kept as the best."""
        if self.validate is None:
            return False
        with loader.quiet():
            averaged = () if self.average is None or self._outline is None else (
                state.averaged_module(self.engine, self.average, self._outline),)
            acceptance = self.validate(self.engine, self.step, *averaged)
        if acceptance is None:
            return False
        self.stale = stale_after(self.stale, self.best, acceptance, self.config.trainer.early_stopping_threshold)
        if not self.config.trainer.keep_best or not better(self.best, acceptance):
            return False
        self.best = Best(self.step, acceptance)
        return True

    def _finished(self, found: Path) -> bool:
        """Whether nothing is left to train after the checkpoint ``found``."""
        saved = checkpoint.read_state(found)
        own = restored(self.run_dir, found, saved) is not None  # another run's checkpoint is only where this one starts
        return saved.step >= self.total_steps or (own and self._exhausted(saved.step, saved.stale_validations))

    def _exhausted(self, step: int, stale: int) -> bool:
        return exhausted(stale, self.config.trainer, first_epoch_over=step >= self.per_epoch,
                         fills_store=self.config.features.mode == "hybrid")

    def _start(self, found: Optional[Path]) -> None:
        """Engine, optimizer state and counters: fresh, or as the checkpoint ``found`` has them."""
        config = self.config
        saved = None
        if found is not None:
            saved = checkpoint.read_state(found)
            require_same(saved.identity, self.identity, found)
            checkpoint.load_weights(self._drafter, found)
            if distributed.is_main():  # reads every byte, so one rank for all
                checkpoint.require_unchanged(found)
        # Rank 0 looks for all: the answer decides on collective saves later.
        self.best = distributed.broadcast_object(restored(self.run_dir, found, saved))  # type: ignore[assignment]
        if distributed.is_main():
            saving.remove_partial(self.run_dir)
            point_to_best(self.run_dir, self.best.step if self.best else None)
        module = TrainingModule(self._drafter, config.objective)
        decay = config.trainer.ema_decay
        self._outline = Outline(module, module.shared) if decay is not None else None
        self.engine = initialize(module, config.trainer, config.optimizer, config.engine)
        self.engine.train()
        if torch.cuda.is_available():
            rehearse(self.engine, self.packer)
        prime(self.engine, self.packer.shape, self.packer.stand_in())
        self.average = WeightAverage(self.engine, decay) if decay is not None else None
        if found is not None and saved is not None:
            self._restore(found, saved)
        for file in (self.metrics, MetricsFile(self.run_dir / VALIDATION)):
            file.truncate(self.step)
        distributed.barrier()

    def _restore(self, found: Path, saved: checkpoint.TrainState) -> None:
        """Optimizer state, averages and counters of the checkpoint ``found``."""
        tensors = checkpoint.load_tensors(found)
        state.scatter(self.engine, tensors, self.average)
        state.set_adam_step(self.engine, saved.adam_step)
        if self.average is not None:
            self.average.updates = saved.adam_step if state.AVERAGES in tensors else 0
            if state.AVERAGES not in tensors:
                logger.warning("%s has no averaged weights: the average begins at its weights", found)
        self.stale = saved.stale_validations if self.best is not None else 0
        self.step, self.epoch, self.samples = saved.step, saved.epoch, saved.samples
        self.skipped_steps = saved.skipped_steps
        # A checkpoint of another run's folder is where this one starts, not one of its own.
        self.saved_at = saved.step if found.parent == checkpoint.directory(self.run_dir) else None
        if saved.total_steps != self.total_steps:
            logger.warning("the run now spans %d steps instead of %d, and so does its learning rate schedule",
                           self.total_steps, saved.total_steps)
        logger.info("resuming from %s: step %d of %d, written by %d ranks at ZeRO stage %d", found, saved.step,
                    self.total_steps, saved.world_size, saved.zero_stage)

    def _windows(self) -> Iterator[Window]:
        """The windows that are left, in order; where they start follows from the step alone."""
        count, size = len(self.packer.source), self.config.trainer.global_batch_size
        epoch, order = -1, []
        for position in range(self.step, self.total_steps):
            if position // self.per_epoch != epoch:
                epoch = position // self.per_epoch
                order = windows(count, size, seed=self.packer.seed, epoch=epoch)
            yield self.packer.window(order[position % self.per_epoch], epoch)

    def _optimizer_step(self, loaded: LoadedWindow, requests: Requests) -> StepResult:
        requests.stop |= self.writer.failed  # known to rank 0 only: all ranks learn of it with the step's sums
        rate = self.config.optimizer.lr * self.schedule.factor(self.step)
        try:
            result = optimizer_step(self.engine, loaded, rate, requests)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"Rank {distributed.rank()} ran out of memory in step {self.step + 1}: {str(error).splitlines()[0]} "
                "Lower trainer.micro_batch_size (with packing: pack_tokens and pack_anchors), trainer.num_anchors, "
                "data.max_length or objective.chunk_megabytes, raise engine.zero_stage, or set "
                "trainer.activation_checkpointing=true; then start it again."
            ) from None
        self.step += 1
        self.epoch = loaded.window.epoch
        self.samples += len(loaded.window.indices)
        self.skipped_steps += result.skipped
        if not result.skipped:
            self._drafter.after_step(result.sums, self.config.drafter.v4.router_bias_rate)
            if self.average is not None:
                self.average.update()
        self.bad_in_a_row = self.bad_in_a_row + 1 if result.skipped else 0
        if self.bad_in_a_row >= max(1, self.config.trainer.max_bad_steps):
            raise UserError(
                f"{self.bad_in_a_row} steps in a row had a loss or gradient that is not finite (last: step "
                f"{self.step}); the warnings above name the samples. The last checkpoint is intact. Check their "
                "features, or lower optimizer.lr, then run the same command again."
            )
        return result

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        return {
            "step": self.step, "epoch": self.epoch, "samples": self.samples,
            **objective_row(result.sums, self.config.objective), **self._drafter.step_metrics(result.sums),
            "lr": self.config.optimizer.lr * self.schedule.factor(self.step - 1), "grad_norm": result.grad_norm,
            "skipped_steps": self.skipped_steps, "seconds": seconds,
            "tokens_per_second": result.tokens / seconds, "peak_memory_bytes": 0,
            **{f"{part}_share": result.seconds[part] / seconds for part in SHARES},
        }

    def _log(self, row: dict[str, Any]) -> None:
        row["peak_memory_bytes"] = int(distributed.all_reduce_max(peak_bytes()))
        row["wait_share"] = distributed.all_reduce_max(row["wait_share"])
        self.metrics.append(row)
        self.tracker.log(tracked(row), self.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _validation_due(self) -> bool:
        return self.step == self.total_steps or self._due(self.config.trainer.validate_every) or self._due(
            self.config.trainer.decode_every)


def _note(row: Mapping[str, Any]) -> str:
    return f"loss {row['loss']:.4f}, acceptance {row['acceptance_length_proxy']:.2f}"
