"""Hidden states that come from target ranks while training: the target ranks' end."""

import logging
import queue
import threading
from collections import deque
from datetime import timedelta
from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from deepspec.data.sources import OnlineFeatures
from deepspec.data.stream import ANSWER, CHANNELS, GOODBYE, REQUEST, Answer, needed_rows
from deepspec.errors import UserError

log = logging.getLogger(__name__)
_UNDER_WAY = 2  # answers to a trainer that may be on their way while the next one is computed


class _Request(NamedTuple):
    trainer: int
    channel: int = GOODBYE
    number: int = 0
    indices: tuple[int, ...] = ()
    lost: Optional[str] = None  # why nothing more can come from this trainer


class FeatureServer:
    """Answers the trainers' requests in the order they come, until all have said goodbye.

    ``sources`` has an OnlineFeatures for every channel. ``stopping`` is asked before each answer: true makes the
    trainers save and stop. A trainer that is silent for ``idle_seconds`` counts as lost.
    """

    def __init__(self, group: Any, trainers: int, sources: Sequence[OnlineFeatures], *, feature_width: int,
                 hidden_width: int, dtype: torch.dtype, stopping: Callable[[], bool], idle_seconds: float) -> None:
        self._group, self._trainers, self._sources = group, trainers, sources
        self._feature_width, self._hidden_width, self._dtype = feature_width, hidden_width, dtype
        self._stopping, self._idle = stopping, timedelta(seconds=idle_seconds)
        self._requests: queue.Queue[_Request] = queue.Queue()
        self._sent: dict[int, deque[tuple[Any, Tensor]]] = {trainer: deque() for trainer in range(trainers)}
        self.packs = self.tokens = 0

    def run(self) -> None:
        """Serve. Raises UserError as soon as a trainer is gone without a goodbye."""
        for trainer in range(self._trainers):
            threading.Thread(target=self._listen, args=(trainer,), name=f"requests-{trainer}", daemon=True).start()
        left = set(range(self._trainers))
        while left:
            request = self._requests.get()
            if request.lost is not None:
                raise UserError(f"Trainer rank {request.trainer} has ended ({request.lost}), and this target rank with "
                                "it. Start the same command again: it continues from the last checkpoint.")
            if request.channel == GOODBYE:
                left.discard(request.trainer)
            else:
                self._answer(request)
        log.info("target rank: %d packs with %d tokens served, trainers are done", self.packs, self.tokens)

    def _answer(self, request: _Request) -> None:
        samples = self._sources[request.channel].get(request.indices)
        documents = [item.sample for item in samples]
        rows = needed_rows(documents)
        answer = Answer(sum(len(item.input_ids) for item in documents), len(rows), self._feature_width,
                        self._hidden_width, self._dtype)
        buffer = answer.empty()
        header, features, last_hidden = answer.parts(buffer)
        header.copy_(torch.tensor([request.number, int(self._stopping())]))
        whole = torch.cat([item.last_hidden for item in samples])
        last_hidden.copy_(whole[rows.to(whole.device)])
        for item, part in zip(samples, features.split([len(item.input_ids) for item in documents])):
            part.copy_(item.features)
        try:
            sent = self._sent[request.trainer]
            sent.append((self._group.send([buffer], request.trainer, ANSWER + request.channel), buffer))
            while len(sent) > _UNDER_WAY:
                sent.popleft()[0].wait(self._idle)
        except RuntimeError as error:
            raise UserError(f"Trainer rank {request.trainer} cannot be sent hidden states ({_short(error)}), so this "
                            "target rank ends. Start the same command again: it continues from the last checkpoint."
                            ) from None
        self.packs, self.tokens = self.packs + 1, self.tokens + answer.tokens

    def _listen(self, trainer: int) -> None:
        """Put the requests of one trainer into the queue, until its goodbye or its end."""
        try:
            while True:
                channel, count, number = self._receive(trainer, 3)
                if channel == GOODBYE:
                    self._requests.put(_Request(trainer))
                    return
                if not 0 <= channel < len(CHANNELS):
                    raise RuntimeError(f"channel {channel} is asked for")
                self._requests.put(_Request(trainer, channel, number, tuple(self._receive(trainer, count))))
        except RuntimeError as error:
            self._requests.put(_Request(trainer, lost=_short(error)))

    def _receive(self, trainer: int, count: int) -> list[int]:
        values = torch.empty(count, dtype=torch.int64)
        self._group.recv([values], trainer, REQUEST).wait(self._idle)
        return values.tolist()


def _short(error: RuntimeError) -> str:
    """Gloo's message without the place in its source."""
    return str(error).partition("] ")[2].partition(". ")[0] or str(error)
