"""One request at a time over several servers, with bounded retries: what all clients of servers have in common.

Three kinds of trouble are kept apart: a server that is gone (ServersDead: nothing about the row is known, the job
should stop), one that is busy or slow (tried again, a bounded number of times), and a row it refuses (the row's own
failure).
"""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Awaitable, Callable, Generic, Mapping, Optional, Sequence, TypeVar

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from deepspec.data.server_pool import DEFAULT_BREAKER, BreakerOptions, Lease, Server, ServerPool

_CONNECT_TIMEOUT = 15.0
_BUSY = (408, 425, 429)
_BROKEN = (500, 502, 503, 504)
# A reply that broke off counts as slow, not as gone: the server has seen the request, so it must use up a retry.
_GONE = (httpx.ConnectError, httpx.ConnectTimeout)
_Result = TypeVar("_Result")
_Client = TypeVar("_Client", bound="PoolClient")


class RowRejected(Exception):
    """A server answered, but not with a usable reply."""


class TryAgain(Exception):
    """Busy, slow, or broken off."""


@dataclass(frozen=True)
class Call(Generic[_Result]):
    """What is asked for one row, of whichever server gets it."""

    path: str  # below the server's address; from its root when it begins with "/"
    body: Callable[[Server], dict[str, Any]]
    seconds: float  # the reply may take
    read: Callable[[httpx.Response, Server], Awaitable[_Result]]  # may raise RowRejected or TryAgain
    optional: tuple[str, ...] = ()  # fields a server may not know without harm; any other decides what is answered
    headers: Mapping[str, str] = field(default_factory=dict)

    def url(self, server: Server) -> str:
        """Where it goes."""
        if self.path.startswith("/"):
            return server.url.removesuffix("/v1") + self.path
        return f"{server.url}/{self.path}"


class PoolClient:
    """Use as ``async with``. ``group`` is the configuration group that messages name."""

    def __init__(self, urls: Sequence[str], *, model: Optional[str], retries: int, connections: int,
                 retry_wait: float = 0.5, breaker: BreakerOptions = DEFAULT_BREAKER, group: str = "responses") -> None:
        self._retries, self._retry_wait = retries, retry_wait
        spare = len(urls)  # looks at servers must not wait for a connection
        limits = httpx.Limits(max_connections=connections + spare, max_keepalive_connections=connections + spare)
        self._http = httpx.AsyncClient(limits=limits, follow_redirects=False)
        self._pool = ServerPool(urls, model, self._http, breaker, group=group)
        self.requests = 0

    async def __aenter__(self: _Client) -> _Client:
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

    async def get(self, url: str) -> Any:
        """A JSON object that is nice to know; None when it cannot be had."""
        try:
            response = await self._http.get(url, timeout=_CONNECT_TIMEOUT)
            found = response.json() if response.status_code == 200 else None
            return found if isinstance(found, dict) else None
        except (httpx.HTTPError, ValueError):
            return None

    async def call(self, call: Call[_Result], row: str) -> _Result:
        """The result for ``row``. Raises ServersDead or RowRejected (which tells the cause, retries included)."""
        attempts = 0
        avoid: set[str] = set()  # servers that have failed this row
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(1 + self._retries), reraise=True,
                wait=wait_random_exponential(multiplier=self._retry_wait, max=30),
                retry=retry_if_exception_type(TryAgain),
            ):
                with attempt:
                    attempts += 1
                    return await self._call_once(call, row, avoid)
        except TryAgain as error:
            raise RowRejected(f"{error} (after {attempts} attempts)") from None
        raise AssertionError("tenacity ends with a result or an exception")

    async def _call_once(self, call: Call[_Result], row: str, avoid: set[str]) -> _Result:
        """Servers that do not connect use up no attempt: they have not seen the row, and their breaker bounds it."""
        while True:
            lease = await self._pool.acquire(avoid)
            server = lease.server
            payload = call.body(server)
            body = {"model": server.model, **{key: payload[key] for key in payload if key not in server.refused}}
            try:
                response = await self._post(lease, call, body, row)
                if response.status_code in (400, 422) and (unknown := [
                    name for name in call.optional if name in body and name in response.text
                ]):
                    server.refused.update(unknown)  # refused unread, so it is not an attempt
                    continue
                if response.status_code != 200:
                    raise RowRejected(f"{server.url}: HTTP {response.status_code} {response.text[:200]}")
                return await call.read(response, server)
            except _GONE as error:
                self._pool.lost(lease, f"{server.url}: {type(error).__name__} {error}")
                avoid.add(server.url)
                await asyncio.sleep(self._retry_wait)
                continue
            except TryAgain:
                avoid.add(server.url)
                raise
            finally:
                self._pool.release(lease)

    async def _post(self, lease: Lease, call: Call[_Result], body: dict[str, Any], row: str) -> httpx.Response:
        server = lease.server
        self.requests += 1
        try:
            response = await self._http.post(
                call.url(server), json=body, headers=dict(call.headers),
                timeout=httpx.Timeout(call.seconds, connect=min(call.seconds, _CONNECT_TIMEOUT)),
            )
        except _GONE:
            self.requests -= 1
            raise
        except httpx.TimeoutException:
            cause = f"no reply from {server.url} within {call.seconds:.0f} s"
            self._pool.silent(lease, row, cause)
            raise TryAgain(cause) from None
        except httpx.HTTPError as error:
            cause = f"{server.url}: {type(error).__name__} {error}"
            self._pool.silent(lease, row, cause)
            raise TryAgain(cause) from None
        cause = f"{server.url}: HTTP {response.status_code} {response.text[:200]}"
        if response.status_code in _BROKEN:
            self._pool.broken(lease, row, cause)
            raise TryAgain(cause)
        self._pool.answered(lease)
        if response.status_code in _BUSY:
            raise TryAgain(cause)
        return response
