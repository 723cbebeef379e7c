"""A client for OpenAI-compatible servers: one chat completion at a time, over several servers, with bounded retries.

Three kinds of trouble are kept apart: a server that is gone (ServerDown: nothing about the row is known, the job should
stop), one that is busy or slow (tried again, a bounded number of times), and a row it refuses (the row's own failure).
"""

import logging
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Optional, Sequence

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from deepspec.errors import InputRefused

log = logging.getLogger(__name__)

_BASE_TIMEOUT = 30.0  # seconds, besides those per token
_HEALTH_TIMEOUT = 10.0
_COOL_DOWN = 15.0  # seconds a server that did not connect is passed over while another one works
_BUSY = (408, 425, 429, 500, 502, 503, 504)
# A reply that broke off counts as slow, not as gone: the server has seen the request, so it must use up a retry.
_GONE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class ServerDown(Exception):
    """No server could be reached."""


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


@dataclass
class _Server:
    url: str
    model: str
    in_flight: int = 0
    resting_until: float = 0.0
    refused: set[str] = field(default_factory=set)  # optional request fields this server does not know


class ChatClient:
    """Use as ``async with``. ``seconds_per_token`` scales the timeout with what is asked for."""

    def __init__(self, urls: Sequence[str], *, model: Optional[str], retries: int, seconds_per_token: float,
                 connections: int, retry_wait: float = 0.5) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._model, self._retries, self._seconds_per_token = model, retries, seconds_per_token
        self._retry_wait = retry_wait
        self._servers: list[_Server] = []
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(limits=limits, follow_redirects=False)
        self.requests = 0

    async def __aenter__(self) -> "ChatClient":
        return self

    async def __aexit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                        trace: Optional[TracebackType]) -> None:
        await self._http.aclose()

    async def connect(self) -> str:
        """Ask every server for its models; returns the model used. Raises InputRefused if none can serve it."""
        problems = []
        for url in self._urls:
            try:
                response = await self._http.get(f"{url}/models", timeout=_HEALTH_TIMEOUT)
                response.raise_for_status()
                names = [entry["id"] for entry in response.json()["data"]]
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{url}: {type(error).__name__} {error}".strip())
                continue
            if not names or (self._model is not None and self._model not in names):
                problems.append(f"{url}: has {', '.join(names) or 'no model'}, not {self._model or 'any'}")
                continue
            self._servers.append(_Server(url, self._model or names[0]))
        for problem in problems:
            log.warning("server left out: %s", problem)
        if not self._servers:
            raise InputRefused(
                f"No server can answer ({'; '.join(problems)}). Start one, for example with 'vllm serve MODEL', and "
                f"give its address up to /v1 in responses.servers."
            )
        models = {server.model for server in self._servers}
        if len(models) > 1:
            raise InputRefused(f"The servers have different models ({', '.join(sorted(models))}): name one in "
                               "responses.model.")
        return self._servers[0].model

    def timeout(self, max_tokens: int) -> float:
        """Seconds one request may take."""
        return _BASE_TIMEOUT + max_tokens * self._seconds_per_token

    async def ask(self, payload: dict[str, Any]) -> Reply:
        """One chat completion. Raises ServerDown or RowRejected (which tells the cause, retries included)."""
        attempts = 0
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(1 + self._retries), reraise=True,
                wait=wait_random_exponential(multiplier=self._retry_wait, max=30),
                retry=retry_if_exception_type((_TryAgain, ServerDown)),
            ):
                with attempt:
                    attempts += 1
                    return await self._ask_once(payload)
        except _TryAgain as error:
            raise RowRejected(f"{error} (after {attempts} attempts)") from None
        raise AssertionError("tenacity ends with a result or an exception")

    async def _ask_once(self, payload: dict[str, Any]) -> Reply:
        server = self._pick()
        body = {"model": server.model, **{key: payload[key] for key in payload if key not in server.refused}}
        seconds = self.timeout(payload["max_tokens"])
        server.in_flight += 1
        self.requests += 1
        try:
            response = await self._http.post(f"{server.url}/chat/completions", json=body, timeout=seconds)
        except _GONE as error:
            server.resting_until = time.monotonic() + _COOL_DOWN
            raise ServerDown(f"{server.url}: {type(error).__name__} {error}") from None
        except httpx.TimeoutException:
            raise _TryAgain(f"no reply from {server.url} within {seconds:.0f} s") from None
        except httpx.HTTPError as error:
            raise _TryAgain(f"{server.url}: {type(error).__name__} {error}") from None
        finally:
            server.in_flight -= 1
        server.resting_until = 0.0
        if response.status_code in _BUSY:
            raise _TryAgain(f"{server.url}: HTTP {response.status_code} {response.text[:200]}")
        if response.status_code == 400 and "return_token_ids" in body and "return_token_ids" in response.text:
            server.refused.add("return_token_ids")
            return await self._ask_once(payload)  # refused unread, so it is not an attempt
        if response.status_code != 200:
            raise RowRejected(f"{server.url}: HTTP {response.status_code} {response.text[:200]}")
        return _reply(response, server.url)

    def _pick(self) -> _Server:
        now = time.monotonic()
        awake = [server for server in self._servers if server.resting_until <= now]
        return min(awake or self._servers, key=lambda server: server.in_flight)


def _reply(response: httpx.Response, url: str) -> Reply:
    try:
        body = response.json()
        choice = body["choices"][0]
        message = choice["message"]
        content, reasoning = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        prompt_ids, response_ids = body.get("prompt_token_ids"), choice.get("token_ids")
        return Reply(
            content=content or "", reasoning=reasoning or "", finish_reason=choice.get("finish_reason"),
            prompt_ids=tuple(prompt_ids) if prompt_ids else None,
            response_ids=tuple(response_ids) if response_ids else None,
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RowRejected(f"{url}: reply without a usable choice ({type(error).__name__}: {error})") from None
