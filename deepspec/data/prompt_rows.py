"""One prompt row, whatever form it came in, as one conversation with slots for the target's answers.

Accepted: ``{"prompt": str}``, ``{"turns": [str, ...]}``, ``{"messages": [{role, content}, ...]}`` and ShareGPT's
``{"conversations": [{from, value}, ...]}``; with ``system``, ``tools``, ``id`` and ``domain`` beside them.

The answers of the source are not kept, because the target gives its own: an assistant turn after a user or tool turn
becomes the slot ``{"role": "assistant"}``. What a slot is not: an assistant turn that calls tools (the tool results
that follow belong to it) and one before the first user turn (a greeting); both stay as context, word for word.
"""

import json
from typing import Any, Optional

from deepspec.artifacts import canonical_hash

SLOT: dict[str, Any] = {"role": "assistant"}
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "model": "assistant",
}
_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")


class RowRefused(ValueError):
    """A row that cannot be a prompt. ``reason`` is a short constant to count by, the message has the details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def is_slot(message: dict[str, Any]) -> bool:
    """Whether the target is to answer here."""
    return message == SLOT


def conversation(row: dict[str, Any]) -> tuple[list[dict[str, Any]], Optional[list[dict[str, Any]]]]:
    """(messages with slots, tools or None) of a source row. Raises RowRefused."""
    messages = [_message(item, index) for index, item in enumerate(_raw_messages(row))]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and not any(item["role"] == "system" for item in messages):
        messages.insert(0, {"role": "system", "content": system})
    if not messages:
        raise RowRefused("empty messages")
    if not any(item["role"] == "user" for item in messages):
        raise RowRefused("no user")
    return _with_slots(messages), _tools(row.get("tools"))


def from_column(row: dict[str, Any], column: str) -> dict[str, Any]:
    """A row whose prompt is the field ``column``: text, or a list of messages. Raises RowRefused if it lacks it."""
    if row.get(column) is None:
        raise RowRefused("no prompt", f"no field {column} among {sorted(row)[:8]}")
    rest = {name: row[name] for name in ("system", "tools", "id", "domain") if name in row}
    return rest | {"prompt" if isinstance(row[column], str) else "messages": row[column]}


def content_id(messages: list[dict[str, Any]], tools: Optional[list[dict[str, Any]]]) -> str:
    """Identity of what the target is asked, independent of where it came from."""
    return canonical_hash({"messages": messages, "tools": tools or []}, 20)


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    for name in ("messages", "conversations", "turns", "prompt"):
        value = row.get(name)
        if value is None:
            continue
        if name == "prompt" and isinstance(value, str):
            return [{"role": "user", "content": value}]
        if isinstance(value, str) and value.lstrip()[:1] == "[":
            value = _json_list(value)  # as Parquet files often hold it
        if not isinstance(value, list):
            raise RowRefused("wrong type", f"{name} is {type(value).__name__}, expected a list")
        if name == "turns":
            # User turns, each to be answered before the next.
            return [item for text in value for item in ({"role": "user", "content": text}, dict(SLOT))]
        return value
    raise RowRefused("no prompt", f"none of prompt, turns, messages, conversations among {sorted(row)[:8]}")


def _json_list(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(item: Any, index: int) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RowRefused("wrong type", f"message {index} is {type(item).__name__}, expected an object")
    role = item.get("role", item.get("from"))
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise RowRefused("unknown role", f"message {index} has role {role!r}, known are {', '.join(ROLES)}")
    content = item["content"] if "content" in item else item.get("value")
    result = {"role": role, "content": _text(content, index)}
    result.update({key: item[key] for key in _KEPT if item.get(key) is not None})
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
    if role == "user" and not result["content"].strip():
        raise RowRefused("empty user turn", f"message {index}")
    return result


def _text(content: Any, index: int) -> str:
    """Content as a string. Missing, null and "" are the same; text parts are joined by line feeds, as servers do."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RowRefused("content is not text", f"message {index} has a part of type {kind!r}")
        return "\n".join(parts)
    raise RowRefused("content is not text", f"message {index} has content of type {type(content).__name__}")


def _with_slots(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    while messages[-1]["role"] == "assistant":  # a last tool call, too, is the target's to make
        messages = messages[:-1]
    result: list[dict[str, Any]] = []
    seen_user = False
    for message in messages:
        seen_user = seen_user or message["role"] == "user"
        if message["role"] != "assistant" or message.get("tool_calls"):
            result.append(message)
        elif not seen_user:
            if message["content"]:
                result.append(message)
        elif result[-1]["role"] in ("user", "tool"):
            result.append(dict(SLOT))
    return [*result, dict(SLOT)] if result[-1]["role"] in ("user", "tool") else result


def _tools(value: Any) -> Optional[list[dict[str, Any]]]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise RowRefused("bad tools", "tools is a string but not JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowRefused("bad tools", "expected a list of objects")
    return value
