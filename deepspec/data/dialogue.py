"""One conversation on its way to being answered, slot by slot."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

from deepspec.data.prompt_rows import is_slot
from deepspec.data.prompts import PromptRow
from deepspec.data.rendering import Renderer
from deepspec.data.responses import ResponseRow, Turn

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class TurnRefused(ValueError):
    """A turn that cannot be asked or whose answer cannot be used; its message is recorded with the row."""


class TurnSkipped(TurnRefused):
    """A prompt that a stated rule leaves out (too long, mask token); it does not count as a failure."""


@dataclass(frozen=True)
class AnswerLimits:
    """Bounds of one answer, the tokens a prompt must not have, and who thinks."""

    max_tokens: int
    max_length: int  # of a sample: prompt and answer
    mask_token_id: Optional[int] = None
    thinking_share: Optional[float] = None  # of the rows; None: all rows as the renderer does

    def thinking(self, row_id: str) -> Optional[bool]:
        """Whether the answers of a row are to be thought about; decided by its id, so it never changes. None: as the
        renderer does."""
        if self.thinking_share is None:
            return None
        digest = hashlib.blake2b(f"thinking\x1f{row_id}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") < self.thinking_share * 2**32


@dataclass
class Dialogue:
    """A prompt row and the answers it has so far."""

    row: PromptRow
    limits: AnswerLimits
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to the slot that is next, earlier slots filled with the answers given here."""
        answers = iter(self.turns)
        result: list[dict[str, Any]] = []
        for message in self.row.messages:
            if not is_slot(message):
                result.append(message)
                continue
            turn = next(answers, None)
            if turn is None:
                break
            result.append(as_message(turn.text))
        return result

    @property
    def thinking(self) -> Optional[bool]:
        """Of this row's answers; None: as the renderer does."""
        return self.limits.thinking(self.row.id)

    @property
    def finished(self) -> bool:
        """No slot is left, or the last answer is none that a user would go on from (cut off, or a tool call)."""
        slots = sum(is_slot(message) for message in self.row.messages)
        return len(self.turns) == slots or bool(self.turns and self.turns[-1].finish_reason != "stop")

    @property
    def request_id(self) -> str:
        """Identity of the next answer: the first is the row's own, so that single turns keep the row's randomness."""
        return f"{self.row.id}#{len(self.turns)}" if self.turns else self.row.id

    def next_prompt(self, renderer: Renderer) -> Optional[tuple[list[int], int]]:
        """(prompt ids, most tokens of the answer) of the next slot; None where the conversation ends, also because
        the next turn has no room in ``max_length``. Raises TurnSkipped, TurnRefused or RenderError."""
        if self.finished:
            return None
        ids = renderer.prompt_ids(self.messages(), self.row.tools, thinking=self.thinking)
        if self._has_mask(ids):
            raise TurnSkipped(f"the prompt contains the mask token (id {self.limits.mask_token_id})")
        room = self.limits.max_length - len(ids)
        if room >= 2:
            return ids, min(self.limits.max_tokens, room)
        if self.turns:
            return None
        raise TurnSkipped(f"the prompt has {len(ids)} tokens, data.max_length is {self.limits.max_length}")

    def _has_mask(self, ids: Sequence[int]) -> bool:
        return self.limits.mask_token_id is not None and self.limits.mask_token_id in ids

    def add(self, turn: Turn, renderer: Renderer) -> None:
        """Take an answer. Raises TurnRefused for an empty one and for one with the mask token."""
        if self._has_mask(turn.response_ids):
            raise TurnRefused(f"turn {len(self.turns)}: the answer has the mask token (id {self.limits.mask_token_id})")
        content = turn.response_ids
        if content and content[-1] == renderer.end_of_turn_id:
            content = content[:-1]
        if not content or not turn.text.strip():
            raise TurnRefused(f"turn {len(self.turns)}: empty answer (finish reason {turn.finish_reason})")
        self.turns.append(turn)

    def result(self) -> ResponseRow:
        """The finished row."""
        row = self.row
        return ResponseRow(row.id, row.domain, row.split, row.messages, tuple(self.turns), row.tools,
                           self.thinking)


def as_message(text: str) -> dict[str, Any]:
    """An answer as clients send it back: reasoning apart from content, so that the template decides what it keeps."""
    head, found, tail = text.rpartition(THINK_CLOSE)
    if not found:
        return {"role": "assistant", "content": text}
    reasoning = head.removeprefix(THINK_OPEN).strip("\n")
    return {"role": "assistant", "content": tail.lstrip("\n"), "reasoning_content": reasoning}


def join_reasoning(content: str, reasoning: str, *, cut: bool = False) -> tuple[str, bool]:
    """(answer with its reasoning as ``<think>..</think>``, whether a tag had to be added to a bare one).

    A template may put the opening tag into the prompt; a server may then return ``r</think>a``, or with a reasoning
    parser ``r`` and ``a`` in separate fields. Both become ``<think>r</think>a``. ``cut``: the answer hit its length
    limit, so reasoning without content was never closed.
    """
    if reasoning:
        return f"{THINK_OPEN}{reasoning}" + ("" if cut and not content else THINK_CLOSE + content), False
    if THINK_CLOSE in content and THINK_OPEN not in content.split(THINK_CLOSE)[0]:
        return THINK_OPEN + content, True
    return content, False


def after_prompt(text: str, prompt_opens_thinking: bool) -> str:
    """The part of an answer that follows the prompt: without the opening tag if the prompt ends with it."""
    return text.removeprefix(THINK_OPEN) if prompt_opens_thinking else text


def opens_thinking(prompt_ids: Sequence[int], renderer: Renderer) -> bool:
    """Whether the generation prompt ends with the opening think tag, so that answers come without it."""
    return renderer.text(list(prompt_ids)[-8:]).rstrip().endswith(THINK_OPEN)
