"""Evaluation prompts: rows of a file or the run's own held-out prompts, turn after turn on the generated history."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

from deepspec.config.schema_evaluation import MIXED, BenchmarkConfig
from deepspec.data.dialogue import AnswerLimits
from deepspec.data.embedded_math import scored_math
from deepspec.data.jsonl import read_rows
from deepspec.data.prompt_rows import RowRefused, conversation, is_slot
from deepspec.data.rendering import Renderer, RenderError
from deepspec.data.responses import RESPONSES_FILE, read_responses
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.errors import InputRefused
from deepspec.evaluation.scoring import Task, task_of

log = logging.getLogger(__name__)
HELD_OUT, EMBEDDED_MATH = "held_out", "embedded_math"
_EMBEDDED_ITEMS = 200  # where no limit is set: the generators never end
Decode = Callable[[list[DecodeRequest]], list[DecodeResult]]
Thinking = Union[bool, str, None]  # on, off, mixed; None: as the template decides


@dataclass(frozen=True)
class Conversation:
    """One prompt; ``messages`` has slots where the target answers."""

    id: str
    domain: str
    messages: tuple[dict[str, Any], ...]
    tools: Optional[tuple[dict[str, Any], ...]] = None
    thinking: Optional[bool] = None  # of this conversation; None: as the renderer does
    task: Optional[Task] = None  # what its last answer has to solve

    @property
    def turns(self) -> int:
        """Answers to generate."""
        return sum(is_slot(message) for message in self.messages)


@dataclass(frozen=True)
class Benchmark:
    """A named set of conversations."""

    name: str
    domain: str
    conversations: tuple[Conversation, ...]


def load_benchmark(config: BenchmarkConfig, responses: Path) -> Benchmark:
    """Read one benchmark; ``responses`` is the run's responses directory, read for ``held_out``. ``embedded_math`` are
    generated tasks with known answers.

    Raises InputRefused for a file that cannot be read and for a row that is no prompt, with file and line.
    """
    if config.path == HELD_OUT:
        if not (responses / RESPONSES_FILE).is_file():
            raise InputRefused(f"benchmark {config.name!r} needs this run's held-out responses, but {responses} has "
                               "none. Make them with data_prep/generate_responses.py, or give a file as the "
                               "benchmark's path.")
        rows = [Conversation(f"{config.name}/{row.id}", row.domain, _unanswered(row.messages), row.tools, row.thinking)
                for row in read_responses(responses, HELD_OUT) if row.messages]  # imported ones have token ids only
    elif config.path == EMBEDDED_MATH:
        rows = [_from_row(config, number, row)
                for number, row in enumerate(scored_math(config.limit or _EMBEDDED_ITEMS), start=1)]
    else:
        rows = [_from_row(config, number, row) for number, row in read_rows(Path(config.path).expanduser())]
    rows = rows if config.limit is None else rows[:config.limit]
    if not rows:
        log.warning("benchmark %s has no prompts (%s); its numbers will be null", config.name, config.path)
    domains = {row.domain for row in rows} or {config.domain}
    return Benchmark(config.name, domains.pop() if len(domains) == 1 else "mixed", tuple(rows))


def _unanswered(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    found = tuple(messages)
    return found if any(is_slot(message) for message in found) else found + ({"role": "assistant"},)


def _from_row(config: BenchmarkConfig, number: int, row: dict[str, Any]) -> Conversation:
    try:
        messages, tools = conversation(row)
    except RowRefused as error:
        raise InputRefused(f"{config.path}:{number}: not a prompt ({error}). A row has \"prompt\": text, "
                           "\"turns\": [text, ..] or \"messages\": [{role, content}, ..].") from None
    kept = None if tools is None else tuple(tools)
    try:
        task = task_of(row)
    except ValueError as error:
        raise InputRefused(f"{config.path}:{number}: the task cannot be scored ({error}). Correct the row, or leave "
                           "its answer and tests out.") from None
    return Conversation(f"{config.name}/{number}", config.domain, tuple(messages), kept, task=task)


def split_domains(benchmark: Benchmark) -> list[Benchmark]:
    """One benchmark per domain where a set mixes them (held-out prompts do): no stratum hides in a mean."""
    groups: dict[str, list[Conversation]] = {}
    for item in benchmark.conversations:
        groups.setdefault(item.domain, []).append(item)
    if len(groups) < 2:
        return [benchmark]
    return [Benchmark(f"{benchmark.name}-{domain}", domain, tuple(rows)) for domain, rows in sorted(groups.items())]


def with_thinking(benchmark: Benchmark, thinking: Thinking, share: Optional[float]) -> Benchmark:
    """The same conversations with reasoning on, off, as their rows were answered (mixed), or as the renderer does.

    A conversation that was not answered before thinks in ``share`` of the cases (null: half), chosen by its id.
    """
    limits = AnswerLimits(1, 1, thinking_share=0.5 if share is None else share)

    def own(item: Conversation) -> Optional[bool]:
        if thinking != MIXED:
            return thinking if isinstance(thinking, bool) else None
        return limits.thinking(item.id) if item.thinking is None else item.thinking

    return replace(benchmark, conversations=tuple(replace(item, thinking=own(item))
                                                  for item in benchmark.conversations))


def _prompt(history: Sequence[dict[str, Any]], item: Conversation, renderer: Renderer,
            turn: int) -> Optional[DecodeRequest]:
    """Request for the next open slot of ``history``; None, with a warning, if the template refuses it."""
    slot = next(place for place, message in enumerate(history) if is_slot(message))
    try:
        own = {} if item.thinking is None else {"thinking": item.thinking}
        ids = renderer.prompt_ids(history[:slot], item.tools, **own)
    except RenderError as error:
        log.warning("%s turn %d left out: %s", item.id, turn + 1, error)
        return None
    return DecodeRequest(f"{item.id}#{turn}", tuple(ids), item.domain)


def first_requests(conversations: Sequence[Conversation], renderer: Renderer) -> list[DecodeRequest]:
    """Requests for the first turns."""
    found = [_prompt(item.messages, item, renderer, 0) for item in conversations]
    return [request for request in found if request is not None]


def run_conversations(conversations: Sequence[Conversation], renderer: Renderer, decode: Decode) -> list[DecodeResult]:
    """Answer every turn of every conversation; a later turn sees the answers generated before it.

    All first turns are decoded together, then all second ones, and so on. Result ids are ``<conversation>#<turn>``. A
    turn the template refuses is left out with the rest of its conversation, with a warning.
    """
    results: list[DecodeResult] = []
    histories = [list(item.messages) for item in conversations]
    alive = [True] * len(conversations)
    for turn in range(max((item.turns for item in conversations), default=0)):
        requests, owners = [], []
        for index, item in enumerate(conversations):
            if not alive[index] or turn >= item.turns:
                continue
            request = _prompt(histories[index], item, renderer, turn)
            alive[index] = request is not None
            if request is not None:
                requests.append(request)
                owners.append(index)
        answered = {item.id: item for item in decode(requests)}
        for request, index in zip(requests, owners):
            answer = answered[request.id]
            slot = next(place for place, message in enumerate(histories[index]) if is_slot(message))
            histories[index][slot] = {"role": "assistant", "content": renderer.text(answer.token_ids)}
            results.append(answer)
    return results
