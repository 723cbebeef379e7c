"""One row of a log of OpenAI chat-completions requests as a row with ``messages`` and ``tools``.

The request may be the row itself or lie under ``body`` or ``request`` (batch files write the first, proxies either,
one inside the other, or as a JSON string). System prompts, tools, tool calls and tool results are kept; answers of the
log become slots that the target fills, as for every source. Ids of a log name a request, may repeat from file to file
and may name a person: rows take the hash of their content instead.
"""

import json
from typing import Any

from deepspec.data.prompt_rows import RowRefused

_ENVELOPES = ("body", "request", "requestBody", "request_body")
_DEPTH = 4


def _object(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            return json.loads(value)
        except ValueError:
            return None
    return value


def _request(row: dict[str, Any]) -> dict[str, Any]:
    current = row
    for _ in range(_DEPTH):
        if "messages" in current:
            return current
        inner = next((found for name in _ENVELOPES if isinstance(found := _object(current.get(name)), dict)), None)
        if inner is None:
            break
        current = inner
    raise RowRefused("no chat request", f"no messages in the row or under {', '.join(_ENVELOPES)}; fields "
                                        f"{sorted(row)[:8]}")


def _modern(message: Any) -> Any:
    """Function calls of 2023 as the tool calls they became."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        return {key: value for key, value in message.items() if key != "role"} | {"role": "tool"}
    call = message.get("function_call")
    if message.get("role") == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return rest | {"tool_calls": [{"type": "function", "function": call}]}
    return message


def unwrap_request(row: dict[str, Any]) -> dict[str, Any]:
    """``{"messages": [...], "tools": [...]}`` and a domain the row may give. Raises RowRefused."""
    request = _request(row)
    messages = request["messages"]
    if isinstance(messages, list):
        messages = [_modern(message) for message in messages]
    tools = request.get("tools")
    functions = request.get("functions")
    if not tools and isinstance(functions, list):
        tools = [{"type": "function", "function": function} for function in functions]
    found = {"messages": messages, "tools": tools}
    return found | ({"domain": row["domain"]} if "domain" in row else {})
