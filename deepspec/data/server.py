"""A client for OpenAI-compatible servers: one chat completion at a time, over several servers, with bounded retries."""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import httpx

from deepspec.data.pool_client import Call, PoolClient, RowRejected, TryAgain
from deepspec.data.server_pool import DEFAULT_BREAKER, BreakerOptions, Server

__all__ = ["ChatClient", "Reply", "RowRejected"]
_BASE_TIMEOUT = 30.0  # seconds, besides those per token
# What a server may not know without harm. Any other field decides what is answered.
_OPTIONAL = ("return_token_ids",)


@dataclass(frozen=True)
class Reply:
    """One answer as the server gave it; token ids only from servers that offer them."""

    content: str
    reasoning: str
    finish_reason: Optional[str]
    prompt_ids: Optional[tuple[int, ...]]
    response_ids: Optional[tuple[int, ...]]
    prompt_tokens: Optional[int] = None  # how many, from servers that only count them


class ChatClient(PoolClient):
    """Use as ``async with``. ``seconds_per_token`` scales the timeout with what is asked for."""

    def __init__(self, urls: Sequence[str], *, model: Optional[str], retries: int, seconds_per_token: float,
                 connections: int, retry_wait: float = 0.5, breaker: BreakerOptions = DEFAULT_BREAKER) -> None:
        super().__init__(urls, model=model, retries=retries, connections=connections, retry_wait=retry_wait,
                         breaker=breaker)
        self._seconds_per_token = seconds_per_token

    def timeout(self, max_tokens: int) -> float:
        """Seconds one request may take."""
        return _BASE_TIMEOUT + max_tokens * self._seconds_per_token

    async def ask(self, payload: dict[str, Any], row: str) -> Reply:
        """One chat completion for ``row``. Raises ServersDead or RowRejected (which tells the cause, retries
        included)."""
        call = Call("chat/completions", lambda _: payload, self.timeout(payload["max_tokens"]), _read, _OPTIONAL)
        return await self.call(call, row)


async def _read(response: httpx.Response, server: Server) -> Reply:
    return _reply(response, server.url)


def _reply(response: httpx.Response, url: str) -> Reply:
    try:
        body = response.json()
    except ValueError as error:
        raise TryAgain(f"{url}: the reply is no JSON ({error}), {len(response.content)} bytes") from None
    try:
        choice = body["choices"][0]
        message = choice["message"]
        content, reasoning = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        prompt_ids, response_ids = body.get("prompt_token_ids"), choice.get("token_ids")
        usage = body.get("usage") or {}
        made, seen = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if response_ids and isinstance(made, int) and made != len(response_ids):
            raise RowRejected(f"{url}: {len(response_ids)} token ids for an answer of {made} tokens")
        return Reply(
            content=content or "", reasoning=reasoning or "", finish_reason=choice.get("finish_reason"),
            prompt_ids=tuple(prompt_ids) if prompt_ids else None,
            response_ids=tuple(response_ids) if response_ids else None,
            prompt_tokens=seen if isinstance(seen, int) and seen > 0 else None,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise RowRejected(f"{url}: reply without a usable choice ({type(error).__name__}: {error})") from None
