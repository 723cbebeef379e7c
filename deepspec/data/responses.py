"""Answers of the target as they are stored, with the exact token ids on both sides of every turn."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Optional

from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused

RESPONSES_FILE = "responses.jsonl"
ERRORS_FILE = "errors.jsonl"
FINISH_REASONS = ("stop", "length", "tool_calls")


@dataclass(frozen=True)
class Turn:
    """One answer. ``response_ids`` ends with the end-of-turn token only if the target produced it."""

    prompt_ids: tuple[int, ...]  # everything the target saw before its first own token
    response_ids: tuple[int, ...]
    finish_reason: str  # stop | length (cut at max_tokens: no stop was produced, none is taught) | tool_calls
    text: str  # the answer without its end-of-turn token, reasoning included


@dataclass(frozen=True)
class ResponseRow:
    """All answers of one prompt row; ``messages`` is the prompt row's conversation, its slots unanswered."""

    id: str
    domain: str
    split: str  # train | held_out
    messages: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    tools: Optional[tuple[dict[str, Any], ...]] = None
    thinking: Optional[bool] = None  # of this row, where rows differ

    def to_json(self) -> dict[str, Any]:
        """The row as it is written."""
        row = {**vars(self), "turns": [vars(turn) for turn in self.turns]}  # asdict would copy every token
        return {name: value for name, value in row.items() if value is not None or name not in ("tools", "thinking")}


def response_from_json(row: dict[str, Any], where: str) -> ResponseRow:
    """A stored row. Raises InputRefused naming ``where`` and the field."""
    try:
        turns = tuple(_turn_from_json(turn) for turn in row["turns"])
        result = ResponseRow(
            id=row["id"], domain=row["domain"], split=row["split"], messages=tuple(row.get("messages", ())),
            turns=turns, tools=tuple(row["tools"]) if row.get("tools") else None,
            thinking=row.get("thinking"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputRefused(f"{where}: row {row.get('id')!r} is not a response row ({_reason(error)})") from None
    if not isinstance(result.id, str) or not result.turns:
        raise InputRefused(f"{where}: row {row.get('id')!r} needs a string id and at least one turn")
    return result


def _turn_from_json(turn: dict[str, Any]) -> Turn:
    sides = []
    for name in ("prompt_ids", "response_ids"):
        ids = turn[name]
        if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
            raise ValueError(f"{name} must be a list of token ids")
        if not ids:
            raise ValueError(f"{name} is empty")
        sides.append(tuple(ids))
    if turn["finish_reason"] not in FINISH_REASONS:
        raise ValueError(f"finish_reason {turn['finish_reason']!r} is none of {', '.join(FINISH_REASONS)}")
    return Turn(sides[0], sides[1], turn["finish_reason"], turn.get("text", ""))


def _reason(error: Exception) -> str:
    return f"missing field {error}" if isinstance(error, KeyError) else str(error)


def read_responses(directory: os.PathLike | str, split: Optional[str] = None) -> Iterator[ResponseRow]:
    """Rows of ``responses.jsonl`` in prompt order; of one split if it is named. Rows may be read one at a time."""
    path = Path(directory) / RESPONSES_FILE
    for number, row in read_rows(path):
        if split is None or row.get("split") == split:
            yield response_from_json(row, f"{path}:{number}")


def truncate_at_length(row: ResponseRow) -> Optional[ResponseRow]:
    """The row up to its first answer that hit max_tokens (``responses.truncated=drop``); None if nothing is left."""
    whole = []
    for turn in row.turns:
        if turn.finish_reason == "length":
            break
        whole.append(turn)
    if len(whole) == len(row.turns):
        return row
    if not whole:
        return None
    return replace(row, turns=tuple(whole))
