"""Hidden states that come from target ranks while training: the trainers' end.

A trainer asks for its packs some time before it needs them, by sample index, and target ranks answer in that order.
Only hidden states travel: of every token the feature layers, and the last hidden state where it predicts a supervised
label. Token ids and masks are known on both sides. T tokens, M layers, D width, n rows that predict a label.
"""

import os
import signal
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.sources import SampleInfo
from deepspec.distributed import Split
from deepspec.errors import UserError

CHANNELS = ("train", "held_out")
REQUEST, ANSWER = 1, 2  # tags; answers of channel c have tag ANSWER + c
GOODBYE = -1  # in the place of a channel
HEADER = 16  # bytes of an answer before the hidden states: two int64, its number and whether to stop


@dataclass(frozen=True)
class Answer:
    """Where the parts of an answer lie: its header, features [T, M*D], then last hidden states [n, D]."""

    tokens: int
    rows: int
    feature_width: int  # M*D
    hidden_width: int  # D
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return HEADER + (self.tokens * self.feature_width + self.rows * self.hidden_width) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """A buffer [size] uint8, page-locked where there is a GPU."""
        return torch.empty(self.size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def parts(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of ``buffer``: header [2] int64, features, last hidden states."""
        end = HEADER + self.tokens * self.feature_width * self.dtype.itemsize
        return (buffer[:HEADER].view(torch.int64),
                buffer[HEADER:end].view(self.dtype).view(self.tokens, self.feature_width),
                buffer[end:].view(self.dtype).view(self.rows, self.hidden_width))


def needed_rows(documents: Sequence[Sample]) -> Tensor:
    """[n] int64: rows of documents laid end to end whose last hidden state predicts a supervised label."""
    parts, begin = [], 0
    for document in documents:
        parts.append(valid_anchors(document.loss_mask) + begin)
        begin += len(document.loss_mask)
    return torch.cat(parts)


@dataclass
class _Asked:
    """A pack that was asked for and is on its way."""

    indices: tuple[int, ...]
    documents: list[Sample]
    number: int
    target: int  # rank in the launch
    answer: Answer
    buffer: Tensor
    arrival: Any  # torch.distributed.Work
    sent: list[tuple[Any, Tensor]]  # what was sent, and its memory until it has gone


class Link:
    """A trainer's connection to all target ranks."""

    def __init__(self, group: Any, split: Split, timeout_seconds: float) -> None:
        self._group, self._split = group, split
        self._timeout = timedelta(seconds=timeout_seconds)
        self._told_to_stop = False

    def ask(self, channel: int, number: int, indices: Sequence[int], documents: list[Sample],
            answer: Answer) -> _Asked:
        """Ask for request ``number`` (from 0) of ``channel``; the requests of all trainers go round the targets."""
        split = self._split
        target = split.trainers + (number * split.trainers + split.rank) % split.targets
        buffer = answer.empty()
        try:
            arrival = self._group.recv([buffer], target, ANSWER + channel)
            sent = [self._send(target, values) for values in ([channel, len(indices), number], list(indices))]
        except RuntimeError as error:
            raise self._lost(target, error) from None
        return _Asked(tuple(indices), documents, number, target, answer, buffer, arrival, sent)

    def receive(self, asked: _Asked) -> tuple[Tensor, Tensor]:
        """Features [T, M*D] and last hidden states [n, D] of a pack. Raises UserError when its target rank is gone."""
        try:
            asked.arrival.wait(self._timeout)
            for work, _ in asked.sent:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(asked.target, error) from None
        header, features, last_hidden = asked.answer.parts(asked.buffer)
        number, stop = header.tolist()
        if number != asked.number:
            raise RuntimeError(f"answer {number} came from target rank {asked.target} instead of {asked.number}")
        if stop and not self._told_to_stop:  # as if this rank had been asked, which saves and ends all
            self._told_to_stop = True
            os.kill(os.getpid(), signal.SIGTERM)
        return features, last_hidden

    def close(self) -> None:
        """Say goodbye to every target rank, which may then end. Raises UserError when one is gone already."""
        for target in range(self._split.trainers, self._split.trainers + self._split.targets):
            try:
                work, _ = self._send(target, [GOODBYE, 0, 0])
                work.wait(self._timeout)
            except RuntimeError as error:
                raise self._lost(target, error) from None

    def _send(self, target: int, values: list[int]) -> tuple[Any, Tensor]:
        message = torch.tensor(values, dtype=torch.int64)
        return self._group.send([message], target, REQUEST), message

    def _lost(self, target: int, error: RuntimeError) -> UserError:
        late = "Timed out" in str(error)
        what = (f"has not answered for {self._timeout.total_seconds():.0f} s (features.queue_timeout)" if late
                else "has ended: it was killed, or its host is gone")
        try:
            reason = self._split.told(f"failed-{target}")
        except UserError:  # rank 0, too, has seen it, and has ended
            reason = None
        return UserError(f"Target rank {target}, which computes hidden states for the trainers (features.mode="
                         f"disaggregated), {what if reason is None else f'has failed: {reason}'}. The last checkpoint "
                         "is intact; start the same command again and it continues from there.")


class StreamedFeatures:
    """Samples of one split whose hidden states target ranks compute; OnlineFeatures' numbers, bit for bit.

    ``announce`` says which packs come next, and at most ``depth`` of them are under way at a time. ``get`` of packs
    that were not announced works, but waits for the whole forward.
    """

    def __init__(self, link: Link, channel: str, documents: Sequence[Sample], *, layers: int, hidden_size: int,
                 dtype: torch.dtype, depth: int) -> None:
        self.documents = documents
        self.samples = [SampleInfo(item.sample_id, item.domain, len(item.input_ids)) for item in documents]
        self._link, self._channel, self._depth = link, CHANNELS.index(channel), depth
        self._layers, self._hidden_size, self._dtype = layers, hidden_size, dtype
        self._announced: deque[tuple[int, ...]] = deque()
        self._asked: deque[_Asked] = deque()
        self._number = 0

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def wanted(self) -> int:
        """How many more packs may be announced to some use."""
        return max(0, self._depth - len(self._announced) - len(self._asked))

    def announce(self, indices: Sequence[int]) -> None:
        """A pack that ``get`` will be asked for, after those announced before."""
        self._announced.append(tuple(indices))
        self._fill()

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        """The samples at ``indices``; rows of last_hidden nobody needs are zero. Raises UserError without targets."""
        asked = self._next(tuple(indices))
        self._fill()
        features, needed = self._link.receive(asked)
        last_hidden = torch.zeros(len(features), self._hidden_size, dtype=self._dtype)
        last_hidden.index_copy_(0, needed_rows(asked.documents), needed)
        lengths = [len(document.input_ids) for document in asked.documents]
        return [FeatureSample(*parts) for parts in
                zip(asked.documents, features.split(lengths), last_hidden.split(lengths), strict=True)]

    def _next(self, indices: tuple[int, ...]) -> _Asked:
        if not self._asked and not self._announced:
            return self._ask(indices)
        if not self._asked:
            self._asked.append(self._ask(self._announced.popleft()))
        asked = self._asked.popleft()
        if asked.indices != indices:
            raise RuntimeError(f"pack {indices} is asked for where {asked.indices} was announced")
        return asked

    def _fill(self) -> None:
        while self._announced and len(self._asked) < self._depth:
            self._asked.append(self._ask(self._announced.popleft()))

    def _ask(self, indices: tuple[int, ...]) -> _Asked:
        documents = [self.documents[index] for index in indices]
        answer = Answer(sum(len(item.input_ids) for item in documents), len(needed_rows(documents)),
                        self._layers * self._hidden_size, self._hidden_size, self._dtype)
        self._number += 1
        return self._link.ask(self._channel, self._number - 1, indices, documents, answer)


def agreement(split: Split, identity: str, timeout_seconds: Optional[float] = None) -> None:
    """Wait until every target rank is ready and has what this trainer has. Raises UserError where one has not."""
    for target in range(split.trainers, split.trainers + split.targets):
        limit = float("inf") if timeout_seconds is None else timeout_seconds
        found = split.wait(f"failed-{target}", f"ready-{target}", seconds=limit)
        text = split.told(found) if found else None
        if not found.startswith("ready"):
            why = f"failed: {text}" if found else f"was not ready after {limit:.0f} s"
            raise UserError(f"Target rank {target} {why}")
        if text != identity:
            raise UserError(f"Target rank {target} has another target or other responses than trainer rank "
                            f"{split.rank} ({text} and {identity}): they must see the same files. Check target.path "
                            "and run.data_root on that rank's host.")
