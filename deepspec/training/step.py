"""One optimizer step: the exact weighted mean over a window, whatever the ranks, packs and ZeRO stage.

With numerators N and weights W of rank r and micro-step m, the gradient is that of ``sum N / sum W`` over the window.
DeepSpeed averages gradients over ranks, so the loss is multiplied by their number; it would also divide by the
accumulation count, which ``scale_wrt_gas=False`` turns off: a tail window has fewer micro-steps than that count says.
"""

import logging
from dataclasses import dataclass
from typing import Any, Iterable, Optional

import torch

from deepspec import distributed
from deepspec.data.batch import TrainingBatch
from deepspec.drafters.types import DrafterShape
from deepspec.objective import Denominators
from deepspec.training.clock import StepClock
from deepspec.training.engine import gradient_norm, set_learning_rate, step_was_skipped
from deepspec.training.loading import LoadedWindow
from deepspec.training.metrics import Sums
from deepspec.training.packs import Packer, Window, stand_in, to_device
from deepspec.training.signals import Requests
from deepspec.training.state import link_optimizer_state, set_adam_step

logger = logging.getLogger(__name__)
_NAMED = 8  # sample ids in a warning


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on all ranks."""

    sums: dict[str, list[float]]
    tokens: int
    grad_norm: float
    skipped: bool
    stop: bool  # some rank was asked to stop
    save: bool
    seconds: dict[str, float]  # by part (wait, forward, backward, optimizer), of this rank


def total_weights(packer: Packer, window: Window) -> Denominators:
    """Denominators of a window: this rank's weights, summed over the ranks."""
    return _over_ranks(packer.weights(window))


def _over_ranks(mine: Denominators) -> Denominators:
    return Denominators(*distributed.all_reduce_sum([mine.ce, mine.tv, mine.confidence]))


def accumulate(engine: Any, packs: Iterable[TrainingBatch], count: int, denominators: Denominators,
               clock: Optional[StepClock] = None) -> tuple[
        Sums, int, list[tuple[tuple[str, ...], torch.Tensor]]]:
    """Forward and backward of ``count`` packs. Returns sums, tokens, and (sample ids, loss) of each pack."""
    sums, tokens, losses = Sums(), 0, []
    clock = clock or StepClock()
    device, world = distributed.device(), distributed.world_size()
    for position, batch in enumerate(packs):
        # Set before the forward: ZeRO reduces at the boundary's backward only.
        engine.set_gradient_accumulation_boundary(position == count - 1)
        loss, pack_sums = engine(to_device(batch, device), denominators)
        clock.mark("forward")
        engine.backward(loss * world, scale_wrt_gas=False)
        clock.mark("backward")
        sums.add(pack_sums)
        losses.append((batch.sample_ids, loss.detach()))
        tokens += len(batch.input_ids) - batch.padding if batch.sample_ids else 0
    return sums, tokens, losses


def optimizer_step(engine: Any, loaded: LoadedWindow, rate: float, requests: Requests) -> StepResult:
    """Train on one window at learning rate ``rate``; a gradient that is not finite changes nothing on any rank."""
    denominators = _over_ranks(loaded.weights)
    set_learning_rate(engine, rate)
    sums, tokens, losses = accumulate(engine, loaded.packs, len(loaded.window.steps), denominators, loaded.clock)
    loaded.clock.mark("other")
    engine.step()
    loaded.clock.mark("optimizer")
    skipped = step_was_skipped(engine)
    if skipped:
        _name_bad_samples(losses)
    values, (tokens_all, stop, save) = sums.reduce([tokens, *requests.take()])
    return StepResult(
        sums=values, tokens=int(tokens_all), skipped=skipped, stop=stop > 0, save=save > 0,
        grad_norm=float("nan") if skipped else gradient_norm(engine), seconds=loaded.clock.seconds(),
    )


def _name_bad_samples(losses: list[tuple[tuple[str, ...], torch.Tensor]]) -> None:
    bad = [name for names, loss in losses if not bool(torch.isfinite(loss)) for name in names]
    everyone: Any = distributed.gather_objects((bad, [name for names, _ in losses for name in names]))
    if everyone is None:
        return
    named = [name for found, _ in everyone for name in found]
    what = "the loss of" if named else "a gradient of the window with"
    named = named or [name for _, names in everyone for name in names]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    logger.warning("step skipped on all ranks: %s %s%s is not finite", what, ", ".join(named[:_NAMED]), more)


def prime(engine: Any, shape: DrafterShape, batch: Optional[TrainingBatch] = None) -> None:
    """One pass of weight 0 at learning rate 0: every parameter then has its optimizer state and nothing has changed.

    It also runs each collective once before the first sample is read. ``batch`` is a stand-in of the packs' own size.
    """
    set_learning_rate(engine, 0.0)
    accumulate(engine, [stand_in(shape) if batch is None else batch], 1, Denominators(0.0, 0.0, 0.0))
    engine.step()
    if step_was_skipped(engine):
        raise RuntimeError("the gradient of a pack without weight is not finite: the initial weights are not")
    link_optimizer_state(engine)
    set_adam_step(engine, 0)


def rehearse(engine: Any, packer: Packer) -> None:
    """Run the largest pack once before training, so that a GPU that is too small says so now and not in hour five."""
    set_learning_rate(engine, 0.0)
    accumulate(engine, [packer.largest()], 1, Denominators(0.0, 0.0, 0.0))
    engine.step()
