"""The servers of a job and which of them work: a circuit breaker for each.

closed: gets requests. open: has failed several times in a row and gets none; its list of models is asked for after a
while, at growing distances. half open: lists its model again and gets one request, which decides. Work goes to the
servers that are closed meanwhile; when none has been for ``patience`` seconds, the job is told to stop.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Collection, Optional, Sequence

import httpx

from deepspec.errors import InputRefused

log = logging.getLogger(__name__)

HEALTH_TIMEOUT = 10.0  # seconds
_LONGEST_REST = 30.0
_POLL = 0.05  # seconds between two looks of a request that waits for a server


class State(Enum):
    """Of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class ServersDead(Exception):
    """No server has answered for as long as the job waits for one."""


@dataclass(frozen=True)
class BreakerOptions:
    """When a server is taken for dead, and for how long the job does without any."""

    failures: int = 5  # in a row, of different rows
    patience: float = 60.0  # seconds
    first_rest: float = 1.0  # seconds between opening and the first look; doubles up to 30


DEFAULT_BREAKER = BreakerOptions()


@dataclass
class Server:
    """One address and its breaker."""

    url: str
    model: str
    state: State = State.CLOSED
    in_flight: int = 0
    trial: bool = False  # the one request of a half open breaker is under way
    requests: int = 0
    opened: int = 0  # times
    cause: str = ""  # of the last failure
    refused: set[str] = field(default_factory=set)  # optional request fields this server does not know
    rest: float = 0.0
    lost_connections: int = 0
    failed_rows: set[str] = field(default_factory=set)  # since the last answer


@dataclass(frozen=True)
class Lease:
    """One request at a server."""

    server: Server
    era: int  # ``server.opened`` when it began: what comes back from before says nothing about the server now
    trial: bool


class ServerPool:
    """Hands out servers and hears how it went. Everything runs in one event loop."""

    def __init__(self, urls: Sequence[str], model: Optional[str], http: httpx.AsyncClient,
                 options: BreakerOptions = DEFAULT_BREAKER, *, group: str = "responses") -> None:
        """``group`` is the configuration group with the options ``servers`` and ``model`` that messages name."""
        self._urls = [url.rstrip("/") for url in dict.fromkeys(urls)]
        self._model, self._http, self._options, self._group = model, http, options, group
        self._looking: set[asyncio.Task[None]] = set()
        self._none_since: Optional[float] = None
        self.servers: list[Server] = []

    async def connect(self) -> str:
        """Ask every server for its models; returns the model used. Raises InputRefused if none can serve it. A server
        that does not answer yet joins in as soon as it does; one with other models is left out."""
        found = await asyncio.gather(*map(self._models, self._urls))
        problems, later = [], []
        for url, names in zip(self._urls, found):
            if isinstance(names, str):
                problems.append(names)
                later.append((url, names))
            elif not names or (self._model is not None and self._model not in names):
                problems.append(f"{url}: has {', '.join(names) or 'no model'}, not {self._model or 'any'}")
            else:
                self.servers.append(Server(url, self._model or names[0]))
        for problem in problems:
            log.warning("server left out for now: %s", problem)
        if not self.servers:
            raise InputRefused(
                f"No server can answer ({'; '.join(problems)}). Start one, for example with 'vllm serve MODEL', and "
                f"give its address up to /v1 in {self._group}.servers."
            )
        models = {server.model for server in self.servers}
        if len(models) > 1:
            raise InputRefused(f"The servers have different models ({', '.join(sorted(models))}): name one in "
                               f"{self._group}.model.")
        model = self.servers[0].model
        for url, cause in later:
            self.servers.append(Server(url, model, cause=cause))
            self._open(self.servers[-1])
        return model

    async def close(self) -> None:
        """End the looks at open servers."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    async def acquire(self, avoid: Collection[str] = ()) -> Lease:
        """A server for one request, rather none of the addresses in ``avoid``; ``release`` must follow. Waits while
        every breaker is open; raises ServersDead when that lasts."""
        while True:
            server = self._pick(avoid)
            if server is not None:
                lease = Lease(server, server.opened, server.state is State.HALF_OPEN)
                server.trial = server.trial or lease.trial
                server.in_flight += 1
                server.requests += 1
                return lease
            self._give_up_in_time()
            await asyncio.sleep(min(_POLL, self._options.first_rest))

    def _pick(self, avoid: Collection[str]) -> Optional[Server]:
        trial = [server for server in self.servers if server.state is State.HALF_OPEN and not server.trial]
        closed = [server for server in self.servers if server.state is State.CLOSED]
        for group in (trial, [server for server in closed if server.url not in avoid], closed):
            if group:
                return min(group, key=lambda server: server.in_flight)
        return None

    def _give_up_in_time(self) -> None:
        now = time.monotonic()
        waited = now - (now if self._none_since is None else self._none_since)
        if waited > self._options.patience and not any(server.state is State.HALF_OPEN for server in self.servers):
            causes = "; ".join(server.cause for server in self.servers)
            raise ServersDead(f"none of {len(self.servers)} has worked for {waited:.0f} s: {causes}")

    def release(self, lease: Lease) -> None:
        """The request has ended, however."""
        lease.server.in_flight -= 1
        if lease.trial:
            lease.server.trial = False

    def answered(self, lease: Lease) -> None:
        """The server gave an answer, if only a refusal: it works."""
        server = lease.server
        server.failed_rows.clear()
        server.lost_connections = 0
        if server.state is State.HALF_OPEN and lease.era == server.opened:
            log.info("server %s works again", server.url)
            server.state, server.rest, self._none_since = State.CLOSED, 0.0, None

    def lost(self, lease: Lease, cause: str) -> None:
        """No connection: says nothing about the row."""
        lease.server.lost_connections += 1
        self._failed(lease, cause)

    def silent(self, lease: Lease, row: str, cause: str) -> None:
        """No reply to a row within its time, or one that broke off."""
        lease.server.failed_rows.add(row)
        self._failed(lease, cause)

    def broken(self, lease: Lease, row: str, cause: str) -> None:
        """An error of the server (HTTP 5xx). It can be the row's doing, and to open the breaker of the only server
        that works would help nobody: rows are charged instead, up to the error limit."""
        if any(other.state is State.CLOSED for other in self.servers if other is not lease.server):
            self.silent(lease, row, cause)
        else:
            self.answered(lease)

    def _failed(self, lease: Lease, cause: str) -> None:
        server = lease.server
        if lease.era != server.opened:
            return
        server.cause = cause
        count = server.lost_connections + len(server.failed_rows)
        if server.state is State.HALF_OPEN or (server.state is State.CLOSED and count >= self._options.failures):
            self._open(server)

    def _open(self, server: Server) -> None:
        server.state = State.OPEN
        server.opened += 1
        server.rest = min(_LONGEST_REST, 2 * server.rest or self._options.first_rest)
        others = sum(other.state is State.CLOSED for other in self.servers)
        if not others and self._none_since is None:
            self._none_since = time.monotonic()
        log.warning("server %s gets no requests for now (%s); %d others do", server.url, server.cause, others)
        task = asyncio.get_running_loop().create_task(self._look(server))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look(self, server: Server) -> None:
        """Until an open server lists its model again."""
        while True:
            await asyncio.sleep(server.rest)
            names = await self._models(server.url)
            if not isinstance(names, str) and server.model in names:
                break
            server.cause = names if isinstance(names, str) else f"{server.url}: has not {server.model} any more"
            server.rest = min(_LONGEST_REST, 2 * server.rest)
        server.failed_rows.clear()
        server.lost_connections = 0
        server.state = State.HALF_OPEN

    async def _models(self, url: str) -> list[str] | str:
        """Names of its models, or what is wrong."""
        try:
            response = await self._http.get(f"{url}/models", timeout=HEALTH_TIMEOUT)
            response.raise_for_status()
            return [str(entry["id"]) for entry in response.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return f"{url}: {type(error).__name__} {error}".strip()
