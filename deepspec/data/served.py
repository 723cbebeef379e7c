"""Hidden states from a serving engine, seen as samples with features, or as a target that can be asked to encode.

The engine's event loop runs in a thread of its own; a bounded number of samples is in flight, each is yielded as soon
as it is there. What comes back is checked: shapes and ids by the adapter, numbers here, against the engine's own
log-probabilities. T tokens, M layers, D width.
"""

import asyncio
import logging
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Callable, Coroutine, Iterable, Iterator, Optional, Protocol, Sequence, TypeVar

import torch
from torch import Tensor

from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.engines.capture import Captured, EngineOptions, HiddenStateEngine, ServerMisused, TokenLogProb
from deepspec.data.engines.sglang_hidden import SglangHidden
from deepspec.data.engines.vllm_hidden import VllmHidden
from deepspec.data.feature_format import LARGEST_MAGNITUDE, usable
from deepspec.data.pool_client import RowRejected
from deepspec.data.server_pool import ServersDead
from deepspec.errors import InputRefused, UserError

log = logging.getLogger(__name__)
ENGINES: dict[str, Callable[[EngineOptions], HiddenStateEngine]] = {"vllm": VllmHidden, "sglang": SglangHidden}
# A single token may be where bfloat16 logits of two kernels differ most; the mean over a prompt may not.
_ONE_TOKEN = 10.0  # times the tolerance
_CHUNK = 256  # rows of logits at a time
_Answer = TypeVar("_Answer")
LayerCheck = Callable[[Tensor, Tensor], Optional[str]]


class Head(Protocol):
    """The part of TargetHead used here."""

    device: torch.device
    dtype: torch.dtype

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[T, D] to [T, D]."""
        ...

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[T, D] to [T, V] float32."""
        ...


@dataclass(frozen=True)
class Refusal:
    """A sample the servers gave no usable hidden states for."""

    sample_id: str
    reason: str


@dataclass(frozen=True)
class Encoded:
    """As TargetFeatures."""

    features: Tensor  # [T, M*D]
    last_hidden: Tensor  # [T, D] after the final norm


class ServedTarget:
    """A target that runs in servers; the head is here. Use as a context manager.

    ``tolerance``: mean difference, in nats, between the engine's log-probabilities and those of
    ``lm_head(last_hidden)`` that is put down to other kernels. ``layer_of``: what the states of the first layer are
    instead, if anything.
    """

    def __init__(self, engine: str, options: EngineOptions, head: Head, *, tolerance: float,
                 layer_of: LayerCheck = lambda ids, states: None) -> None:
        self._engine = ENGINES[engine](options)
        self._head, self._tolerance, self._in_flight = head, tolerance, options.concurrency
        self._layer_of, self._layers, self._width = layer_of, options.layers, options.hidden_size
        self._normalised: Optional[bool] = None
        self._checked: set[str] = set()  # servers whose first sample was compared token by token
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hidden-states", daemon=True)
        self.device = head.device
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> "ServedTarget":
        self._thread.start()
        try:
            self.facts = self._await(self._engine.connect())
        except ServerMisused as error:
            self.close()
            raise InputRefused(f"{error}.") from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is in flight and end the thread."""
        if self._loop.is_closed():
            return
        self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.close()

    def _start(self, work: Coroutine[Any, Any, _Answer]) -> "Future[_Answer]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _await(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        return self._start(work).result()

    def requests(self) -> dict[str, int]:
        """Requests by server."""
        return {server.url: server.requests for server in self._engine.servers}

    def stream(self, samples: Iterable[Sample]) -> Iterator[FeatureSample | Refusal]:
        """Every sample with its hidden states, or why there are none, as they come.

        Raises UserError when no server works any more and InputRefused when one serves something else.
        """
        coming = iter(samples)
        flying: dict["Future[Captured]", Sample] = {}
        try:
            while True:
                for sample in coming:
                    flying[self._start(self._engine.capture(sample.input_ids.tolist(), sample.sample_id))] = sample
                    if len(flying) >= self._in_flight:
                        break
                if not flying:
                    return
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    yield self._finished(flying.pop(future), future)
        finally:
            for future in flying:
                future.cancel()

    def _finished(self, sample: Sample, future: "Future[Captured]") -> FeatureSample | Refusal:
        try:
            return self._checked_sample(sample, future.result())
        except RowRejected as error:
            return Refusal(sample.sample_id, str(error))
        except ServersDead as error:
            raise UserError(f"The servers of hidden states stopped answering: {error}. What is finished is kept. Start "
                            "them and run the same command again: it continues from there.") from None
        except ServerMisused as error:
            raise InputRefused(f"{error}. (sample {sample.sample_id!r})") from None

    def encode(self, input_ids: Tensor, lengths: Sequence[int]) -> Encoded:
        """Documents laid end to end, as FrozenTarget.encode. Raises UserError for one the servers refuse."""
        parts = input_ids.cpu().split(list(lengths))
        samples = [Sample(str(place), "", ids, torch.ones(len(ids), dtype=torch.bool))
                   for place, ids in enumerate(parts)]
        found: dict[str, FeatureSample] = {}
        for item in self.stream(samples):
            if isinstance(item, Refusal):
                raise UserError(f"A sample of {lengths[int(item.sample_id)]} tokens got no hidden states: "
                                f"{item.reason}. With features.server.store=true such a sample is set aside instead.")
            self._check_numbers(item, lengths[int(item.sample.sample_id)])
            found[item.sample.sample_id] = item
        ordered = [found[sample.sample_id] for sample in samples]
        return Encoded(torch.cat([item.features for item in ordered]).to(self.device),
                       torch.cat([item.last_hidden for item in ordered]))

    def _check_numbers(self, item: FeatureSample, tokens: int) -> None:
        """As the writer of a store does, where there is no store."""
        for place, layer in enumerate(self._layers):
            values = item.features[:, place * self._width:(place + 1) * self._width]
            if not usable(values):
                row, channel = torch.nonzero(~(values.abs() <= LARGEST_MAGNITUDE))[0].tolist()
                raise UserError(f"A sample of {tokens} tokens came with unusable hidden states: layer {layer}: value "
                                f"{values[row, channel].item()} at token {row}, channel {channel}. With "
                                "features.server.store=true such a sample is set aside instead.")

    def _checked_sample(self, sample: Sample, captured: Captured) -> FeatureSample:
        thorough = captured.server not in self._checked
        if thorough and not captured.logprobs:
            raise ServerMisused(f"{captured.server} gave no log-probabilities, so its hidden states cannot be checked")
        if self._normalised is None:
            self._normalised = captured.normalised
        if self._normalised is None:  # the engine does not say: whichever gives its own log-probabilities
            errors = {how: self._error(captured, how) for how in (True, False)}
            self._normalised = min(errors, key=lambda how: errors[how])
        last = self._last(captured, self._normalised)
        self._compare(sample, captured, last, thorough)
        if thorough:
            self._check_layers(sample, captured)
        self._checked.add(captured.server)
        return FeatureSample(sample, captured.features, last)

    def _last(self, captured: Captured, normalised: bool) -> Tensor:
        last = captured.last.to(self._head.device, self._head.dtype)
        return last if normalised else self._head.final_norm(last)

    def _error(self, captured: Captured, normalised: bool) -> float:
        return logprob_error(self._head, self._last(captured, normalised), captured.logprobs)

    def _compare(self, sample: Sample, captured: Captured, last: Tensor, thorough: bool) -> None:
        error = logprob_error(self._head, last, captured.logprobs)
        limit = self._tolerance * (1.0 if len(captured.logprobs) > 1 else _ONE_TOKEN)
        if error <= limit:
            if thorough:
                log.info("features: %s: log-probabilities of lm_head(last hidden) are its own within %.2g nats",
                         captured.server, error)
            return
        message = (
            f"{captured.server}, sample {sample.sample_id!r}: log-probabilities of lm_head(last hidden) differ from "
            f"the server's own by {error:.3g} nats on average, at most {limit:.3g} may be rounding "
            "(features.server.logprob_tolerance). It serves another model than target.path, or its last layer is not "
            "among the hidden states"
        )
        raise ServerMisused(message) if thorough else RowRejected(message)

    def _check_layers(self, sample: Sample, captured: Captured) -> None:
        """The first layer tells how the server counts."""
        found = self._layer_of(sample.input_ids, captured.features[:, :self._width])
        if found is not None:
            raise ServerMisused(f"{captured.server} gives {found} as layer {self._layers[0]} of "
                                f"target.feature_layers={list(self._layers)}: it was started with other layer ids. "
                                "vLLM counts what a layer reads, so its ids are these + 1; SGLang's are these")


def logprob_error(head: Head, last_hidden: Tensor, logprobs: Sequence[TokenLogProb]) -> float:
    """Mean absolute difference in nats; infinite for a NaN or another vocabulary, 0 where nothing is known."""
    if not logprobs:
        return 0.0
    total = 0.0
    for begin in range(0, len(logprobs), _CHUNK):
        part = logprobs[begin:begin + _CHUNK]
        logits = head.logits(last_hidden[[entry.position for entry in part]])
        if not all(0 <= entry.token < logits.shape[-1] for entry in part):
            return float("inf")
        tokens = torch.tensor([entry.token for entry in part], device=logits.device)
        own = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        theirs = torch.tensor([entry.value for entry in part], device=logits.device)
        total += float((own - theirs).abs().sum())
    return total / len(logprobs) if total == total else float("inf")
