"""A client for OpenAI-compatible servers: one chat completion at a time, over several servers, with bounded retries.

Three kinds of trouble are kept apart: a server that is gone (ServersDead: nothing about the row is known, the job
should stop), one that is busy or slow (tried again, a bounded number of times), and a row it refuses (the row's own
failure).
"""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Optional, Sequence

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from deepspec.data.server_pool import DEFAULT_BREAKER, BreakerOptions, Lease, Server, ServerPool

_BASE_TIMEOUT = 30.0  # seconds, besides those per token
_CONNECT_TIMEOUT = 15.0
_BUSY = (408, 425, 429)
_BROKEN = (500, 502, 503, 504)
# A reply that broke off counts as slow, not as gone: the server has seen the request, so it must use up a retry.
_GONE = (httpx.ConnectError, httpx.ConnectTimeout)
# What a server may not know without harm. Any other field decides what is answered.
_OPTIONAL = ("return_token_ids",)


class RowRejected(Exception):
    """A server answered, but not with a usable reply."""


class _TryAgain(Exception):
    """Busy, slow, or broken off."""


@dataclass(frozen=True)
class Reply:
    """One answer as the server gave it; token ids only from servers that offer them."""

    content: str
    reasoning: str
    finish_reason: Optional[str]
    prompt_ids: Optional[tuple[int, ...]]
    response_ids: Optional[tuple[int, ...]]
    prompt_tokens: Optional[int] = None  # how many, from servers that only count them


class ChatClient:
    """Use as ``async with``. ``seconds_per_token`` scales the timeout with what is asked for."""

    def __init__(self, urls: Sequence[str], *, model: Optional[str], retries: int, seconds_per_token: float,
                 connections: int, retry_wait: float = 0.5, breaker: BreakerOptions = DEFAULT_BREAKER) -> None:
        self._retries, self._seconds_per_token, self._retry_wait = retries, seconds_per_token, retry_wait
        spare = len(urls)  # looks at servers must not wait for a connection
        limits = httpx.Limits(max_connections=connections + spare, max_keepalive_connections=connections + spare)
        self._http = httpx.AsyncClient(limits=limits, follow_redirects=False)
        self._pool = ServerPool(urls, model, self._http, breaker)
        self.requests = 0

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                        trace: Optional[TracebackType]) -> None:
        await self._pool.close()
        await self._http.aclose()

    async def connect(self) -> str:
        """The model all servers have; see ServerPool.connect."""
        return await self._pool.connect()

    @property
    def servers(self) -> list[Server]:
        """With their counts."""
        return self._pool.servers

    def timeout(self, max_tokens: int) -> float:
        """Seconds one request may take."""
        return _BASE_TIMEOUT + max_tokens * self._seconds_per_token

    async def ask(self, payload: dict[str, Any], row: str) -> Reply:
        """One chat completion for ``row``. Raises ServersDead or RowRejected (which tells the cause, retries
        included)."""
        attempts = 0
        avoid: set[str] = set()  # servers that have failed this row
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(1 + self._retries), reraise=True,
                wait=wait_random_exponential(multiplier=self._retry_wait, max=30),
                retry=retry_if_exception_type(_TryAgain),
            ):
                with attempt:
                    attempts += 1
                    return await self._ask_once(payload, row, avoid)
        except _TryAgain as error:
            raise RowRejected(f"{error} (after {attempts} attempts)") from None
        raise AssertionError("tenacity ends with a result or an exception")

    async def _ask_once(self, payload: dict[str, Any], row: str, avoid: set[str]) -> Reply:
        """Servers that do not connect use up no attempt: they have not seen the row, and their breaker bounds it."""
        while True:
            lease = await self._pool.acquire(avoid)
            server = lease.server
            body = {"model": server.model, **{key: payload[key] for key in payload if key not in server.refused}}
            try:
                response = await self._post(lease, body, row)
            except _GONE as error:
                self._pool.lost(lease, f"{server.url}: {type(error).__name__} {error}")
                avoid.add(server.url)
                await asyncio.sleep(self._retry_wait)
                continue
            except _TryAgain:
                avoid.add(server.url)
                raise
            finally:
                self._pool.release(lease)
            unknown = [name for name in _OPTIONAL if name in body and name in response.text]
            if unknown and response.status_code in (400, 422):
                server.refused.update(unknown)  # refused unread, so it is not an attempt
                continue
            if response.status_code != 200:
                raise RowRejected(f"{server.url}: HTTP {response.status_code} {response.text[:200]}")
            return _reply(response, server.url)

    async def _post(self, lease: Lease, body: dict[str, Any], row: str) -> httpx.Response:
        server = lease.server
        seconds = self.timeout(body["max_tokens"])
        self.requests += 1
        try:
            response = await self._http.post(
                f"{server.url}/chat/completions", json=body,
                timeout=httpx.Timeout(seconds, connect=min(seconds, _CONNECT_TIMEOUT)),
            )
        except _GONE:
            self.requests -= 1
            raise
        except httpx.TimeoutException:
            cause = f"no reply from {server.url} within {seconds:.0f} s"
            self._pool.silent(lease, row, cause)
            raise _TryAgain(cause) from None
        except httpx.HTTPError as error:
            cause = f"{server.url}: {type(error).__name__} {error}"
            self._pool.silent(lease, row, cause)
            raise _TryAgain(cause) from None
        cause = f"{server.url}: HTTP {response.status_code} {response.text[:200]}"
        if response.status_code in _BROKEN:
            self._pool.broken(lease, row, cause)
            raise _TryAgain(cause)
        self._pool.answered(lease)
        if response.status_code in _BUSY:
            raise _TryAgain(cause)
        return response


def _reply(response: httpx.Response, url: str) -> Reply:
    try:
        body = response.json()
    except ValueError as error:
        raise _TryAgain(f"{url}: the reply is no JSON ({error}), {len(response.content)} bytes") from None
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
