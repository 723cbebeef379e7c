"""Batched speculative decoding of ragged rows with continuous batching.

A step is one forward of the target over all rows, flat and without padding: a row contributes the tokens that are not
yet cached (its prompt, or its anchor) and then the drafts it verifies. Prefill, plain decoding and verification are one
case.
"""

import time
from collections import deque
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from deepspec.decoding.asking import drafting_slots
from deepspec.decoding.draft import draft_uniforms
from deepspec.decoding.modes import MODES, SCHEDULED
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.decoding.recurrent import draft_state
from deepspec.decoding.rows import Kept, Outcome, Row, Step, keep, occupied, plan_step
from deepspec.decoding.types import BlockDetail, DecodeRequest, DecodeResult, DecodeTimings, DraftProposal, RoundRecord
from deepspec.decoding.verification import Verification, verify
from deepspec.errors import ConfigError, InputRefused
from deepspec.scheduling import Floats
from deepspec.targets.sampling import PURPOSE_ACCEPT, PURPOSE_TARGET, Sampling, uniform

_LOGITS_BYTES = 1 << 28  # of one group of requests; probabilities and the residual come on top


class SpeculativeDecoder:
    """Lossless speculative decoding: whatever the mode, answers are distributed as the target's own.

    ``mode`` none decodes with the target alone, fixed verifies all K drafts of every block, scheduled and asynchronous
    let ``scheduler`` choose. In the first two a prompt's answer depends on (seed, prompt id) and not on its batch; a
    schedule depends on the other requests, so with it only the distribution (at temperature 0 the answer) is the same.
    ``record`` keeps hidden states and Eq. 8 of every block; use it with fixed mode. With ``ignore_eos`` only the token
    budget ends an answer.
    """

    def __init__(self, target: Any, drafter: Any, sampling: Sampling, *, batch_size: int, max_new_tokens: int,
                 mode: str = "fixed", scheduler: Optional[ThroughputScheduler] = None, record: bool = False,
                 ignore_eos: bool = False) -> None:
        if mode not in MODES:
            raise ConfigError(f"decoding mode {mode!r} is not one of {', '.join(MODES)}.")
        if batch_size < 1 or max_new_tokens < 1:
            raise ConfigError(f"batch_size={batch_size} and max_new_tokens={max_new_tokens} must be at least 1.")
        if mode != "none" and drafter is None:
            raise ConfigError(f"decoding mode {mode!r} needs a drafter. Use mode none to decode with the target alone.")
        if mode in SCHEDULED and scheduler is None:
            raise ConfigError(f"{mode} decoding needs a throughput profile. Make it with "
                              "launch/profile_throughput.py, or leave it out of evaluate.modes.")
        self.target = target
        self.drafter = None if mode == "none" else drafter
        self.sampling = sampling
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.mode = mode
        self.scheduler = scheduler if mode in SCHEDULED else None
        self.record = record
        self.timings = DecodeTimings()
        self.clock = time.perf_counter  # replaced by the time of the process where other jobs share the cores
        self._stop_ids = frozenset() if ignore_eos else frozenset(target.spec.eos_token_ids)

    def decode(self, requests: Iterable[DecodeRequest],
               on_round: Optional[Callable[[DecodeTimings], None]] = None) -> Iterator[DecodeResult]:
        """Answer all requests, yielding each as it finishes. ``on_round`` is called after every step.

        Raises InputRefused for an empty prompt or an id that occurs twice.
        """
        for finished in self.rounds(requests):
            if on_round is not None:
                on_round(self.timings)
            yield from finished

    def rounds(self, requests: Iterable[DecodeRequest]) -> Iterator[list[DecodeResult]]:
        """``decode`` step by step: the answers that finished in each. Raises as ``decode`` does."""
        waiting = deque(requests)
        self._check(waiting)
        self.timings = DecodeTimings()
        if not waiting:
            return
        longest = max(len(request.prompt_ids) for request in waiting) + self.max_new_tokens
        self._open(min(self.batch_size, len(waiting)), min(longest, 512))
        while waiting or any(row is not None for row in self._rows):
            self._admit(waiting)
            yield self._round()

    def _open(self, slots: int, capacity: int) -> None:
        """Empty rows and caches; they grow beyond ``capacity`` tokens when a row needs it."""
        self._rows: list[Optional[Row]] = [None] * slots
        self._cache = self.target.new_cache(slots, capacity)
        self._drafts = None
        if self.drafter is not None:
            size = self.target.tokenizer_size
            self._drafts = draft_state(self.drafter, slots, tokenizer_size=size, capacity=capacity)
        if self.scheduler is not None:
            self.scheduler.reset()
            self.scheduler.expect(slots)

    def _check(self, requests: Sequence[DecodeRequest]) -> None:
        seen: set[str] = set()
        for request in requests:
            if not request.prompt_ids:
                raise InputRefused(f"prompt {request.id!r} has no tokens. Remove it from the prompts.")
            if request.id in seen:
                raise InputRefused(f"prompt id {request.id!r} occurs twice; ids choose the random numbers. Rename one.")
            seen.add(request.id)

    def _admit(self, waiting: deque[DecodeRequest]) -> None:
        """Give every free slot to the next request."""
        for slot, row in enumerate(self._rows):
            if row is None and waiting:
                request = waiting.popleft()
                limit = len(request.prompt_ids) + (request.max_new_tokens or self.max_new_tokens)
                blind = self.scheduler is not None and self.scheduler.blind
                self._rows[slot] = Row(request, list(request.prompt_ids), limit, blind=blind)

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return self.clock()

    def _round(self) -> list[DecodeResult]:
        """Propose, verify, keep; returns the requests that finished."""
        began = self._clock()
        proposal = self._propose()
        lengths, survival = self._choose_lengths(proposal)
        drafted = self._clock()
        step = plan_step(self._rows, lengths)
        drafts = {} if proposal is None else dict(zip(proposal.rows, proposal.ids.tolist()))
        hidden, features = self._forward(step, drafts)
        outcome = self._verify(step, proposal, hidden)
        verified = self._clock()
        kept = self._keep(step, drafts, outcome, features)
        self._log(step, kept, outcome, proposal)
        if self.scheduler is not None and survival is not None and proposal is not None:
            settled = [kept[slot] for slot in proposal.rows]
            self.scheduler.observe(survival, np.array([item.known for item in settled]),
                                   np.array([item.accepted for item in settled]))
        finished = self._collect()
        self.timings.draft_seconds += drafted - began
        self.timings.verify_seconds += verified - drafted
        seconds = self._clock() - began
        self.timings.total_seconds += seconds
        whole = proposal is None or len(proposal.rows) == len(step.slots)
        if self.scheduler is not None and whole and max(step.feeds) == 1:
            self.scheduler.observe_seconds(len(step.slots), sum(step.counts), proposal is not None, seconds)
        self.timings.steps += 1
        self.timings.draft_steps += proposal is not None
        return finished

    def _propose(self) -> Optional[DraftProposal]:
        """Drafts of all rows that can draft, None in rounds without drafting."""
        ready = drafting_slots(self._rows, self.scheduler, self._drafts, self._cache) if self._drafts else []
        if self._drafts is None or not ready:
            return None
        rows = [occupied(self._rows, slot) for slot in ready]
        uniforms = draft_uniforms(self.sampling.seed, [row.request.id for row in rows], [row.cached for row in rows],
                                  [row.turns for row in rows], self._drafts.length)
        for row in rows:
            row.turns += 1
        return self._drafts.propose(ready, [row.ids[-1] for row in rows], uniforms, self.sampling)

    def _choose_lengths(self, proposal: Optional[DraftProposal]) -> tuple[dict[int, int], Optional[Floats]]:
        """Verified drafts by slot, and the survivals [R, K] that decided.

        A fixed round verifies all K even where the answer will be cut sooner, so that its statistics are not deflated
        by the end of the budget; a scheduled one does not pay for tokens that cannot be used.
        """
        if proposal is None:
            return {}, None
        length = proposal.ids.shape[1]
        if self.scheduler is None:
            return dict.fromkeys(proposal.rows, length), None
        logits = None if proposal.confidence_logits is None else proposal.confidence_logits.cpu().numpy()
        survival = self.scheduler.survival(logits, len(proposal.rows))
        left = [occupied(self._rows, slot).limit - len(occupied(self._rows, slot).ids) - 1 for slot in proposal.rows]
        lengths = self.scheduler.lengths(survival, np.clip(left, 0, length))
        return dict(zip(proposal.rows, lengths.tolist())), survival

    def _forward(self, step: Step, drafts: dict[int, list[int]]) -> tuple[Tensor, Tensor]:
        """Last hidden states and features of the step's tokens."""
        flat: list[int] = []
        for slot, feed, length in zip(step.slots, step.feeds, step.lengths):
            row = occupied(self._rows, slot)
            flat.extend(row.ids[row.cached:row.cached + feed])
            flat.extend(drafts[slot][:length] if length else ())
        seen = self._drafts is not None and not all(occupied(self._rows, slot).blind for slot in step.slots)
        result = self.target.step(torch.tensor(flat), step.slots, step.counts, self._cache, features=seen)
        return result.last_hidden, result.features

    def _verify(self, step: Step, proposal: Optional[DraftProposal], hidden: Tensor) -> dict[int, Outcome]:
        """Outcome by slot. Requests are taken in groups that bound the memory of the logits."""
        outcomes: dict[int, Outcome] = {}
        limit = max(1, _LOGITS_BYTES // (4 * self.target.spec.vocab_size))
        group: list[int] = []
        size = 0
        for place in [*step.finals, -1]:
            rows = 0 if place < 0 else step.lengths[place] + 1
            if group and (place < 0 or size + rows > limit):
                result = self._verify_group(step, group, proposal, hidden)
                known = result.analytic_rate
                rates = [None] * len(group) if known is None else known.float().cpu().numpy()
                for item, *values in zip(group, result.accepted.tolist(), result.emitted.tolist(), rates):
                    outcomes[step.slots[item]] = Outcome(*values)
                group, size = [], 0
            group.append(place)
            size += rows
        return outcomes

    def _verify_group(self, step: Step, group: list[int], proposal: Optional[DraftProposal],
                      hidden: Tensor) -> Verification:
        device = hidden.device
        lengths = np.array([step.lengths[place] for place in group])
        rows = [occupied(self._rows, step.slots[place]) for place in group]
        firsts = np.array([step.starts[place] + step.feeds[place] - 1 for place in group])
        starts = np.cumsum(lengths + 1) - lengths - 1
        wanted = np.repeat(firsts - starts, lengths + 1) + np.arange(len(lengths) + lengths.sum())
        logits = self.target.logits(hidden[torch.from_numpy(wanted).to(device)])
        if not lengths.any():
            proposal = None
        width = 1 if proposal is None else proposal.ids.shape[1] + 1
        names = [row.request.id for row in rows for _ in range(width)]
        positions = [len(row.ids) + j for row in rows for j in range(width)]
        emit = uniform(self.sampling.seed, names, positions, PURPOSE_TARGET).view(-1, width).to(device)
        accept = uniform(self.sampling.seed, names, positions, PURPOSE_ACCEPT).view(-1, width)[:, :-1].to(device)
        places = {} if proposal is None else {slot: i for i, slot in enumerate(proposal.rows)}
        index = torch.tensor([places.get(step.slots[place], 0) for place in group], device=device)
        return verify(logits, torch.from_numpy(starts).to(device), torch.from_numpy(lengths).to(device), proposal,
                      index, accept, emit, self.sampling, analytic=self.record)

    def _keep(self, step: Step, drafts: dict[int, list[int]], outcomes: dict[int, Outcome],
              features: Tensor) -> dict[int, Kept]:
        """Append tokens, forget rejected cache entries, hand features of verified tokens to the drafter's context."""
        kept: dict[int, Kept] = {}
        spans: list[tuple[int, int, int]] = []
        for slot, feed, length, start in zip(step.slots, step.feeds, step.lengths, step.starts):
            row = occupied(self._rows, slot)
            if slot in outcomes:
                outcome = outcomes[slot]
                kept[slot] = keep(row, feed, drafts[slot][:length] if length else (), outcome.accepted, outcome.emitted,
                                  self._stop_ids)
                self.timings.tokens += kept[slot].tokens
                verified = feed + outcome.accepted
                if verified < feed + length:
                    self._cache.truncate(slot, row.cached)
            else:
                row.cached += feed
                verified = feed
            if row.finish_reason is None and not row.blind:
                spans.append((slot, start, verified))  # what the row has cached now ends with them
        if self._drafts is not None and spans:
            counts = [count for _, _, count in spans]
            if sum(counts) < len(features):
                wanted = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
                # A copy of what is needed: a slice would keep the features of the whole step alive.
                features = features[torch.from_numpy(wanted).to(features.device)]
            for (slot, _, count), part in zip(spans, features.split(counts)):
                row = occupied(self._rows, slot)
                self._drafts.append(slot, part, row.ids[row.cached - count + 1:row.cached + 1])
        return kept

    def _log(self, step: Step, kept: dict[int, Kept], outcomes: dict[int, Outcome],
             proposal: Optional[DraftProposal]) -> None:
        """One record per row that took part in a round; a prefill is none."""
        places = {} if proposal is None else {slot: i for i, slot in enumerate(proposal.rows)}
        logits = None
        if proposal is not None and proposal.confidence_logits is not None:
            logits = proposal.confidence_logits.cpu().numpy()
        hidden = previous = None
        if self.record and proposal is not None:
            hidden, previous = proposal.hidden.to(torch.float16).cpu().numpy(), proposal.previous_ids.cpu().numpy()
        for place in step.finals:
            slot, item = step.slots[place], kept[step.slots[place]]
            row, i = occupied(self._rows, slot), places.get(slot)
            if len(row.ids) - item.tokens == len(row.request.prompt_ids):
                continue
            detail = None
            rate = outcomes[slot].analytic_rate
            if i is not None and hidden is not None and previous is not None and rate is not None:
                detail = BlockDetail(rate, hidden[i].copy(), previous[i].copy())
            row.rounds.append(RoundRecord(
                drafted=0 if i is None or proposal is None else proposal.ids.shape[1], verified=step.lengths[place],
                known=item.known, accepted=item.accepted, bonus=item.bonus,
                confidence_logits=None if i is None or logits is None else logits[i].copy(), detail=detail))

    def _collect(self) -> list[DecodeResult]:
        """Results of finished rows; their slots are free at once."""
        finished = []
        for slot, row in enumerate(self._rows):
            if row is not None and row.finish_reason is not None:
                finished.append(row.result())
                self._rows[slot] = None
                self._cache.truncate(slot, 0)
                if self._drafts is not None:
                    self._drafts.drop(slot)
        return finished
