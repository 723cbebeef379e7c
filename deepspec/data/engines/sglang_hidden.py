"""Hidden states from SGLang's native ``/generate`` with ``return_hidden_states``, as JSON numbers in the reply.

Recorded from SGLang 0.5.23, whose servers return either the layers (``--enable-return-aux-hidden-states
--speculative-algorithm DFLASH --return-aux-hidden-state-layer-ids``, ids as ours) or the last hidden state
(``--enable-return-hidden-states``), never both: two servers are asked for every sample. JSON is about 20 bytes per
number, so this suits small targets and short samples.
"""

import asyncio
import logging
from typing import Any, Optional, Sequence

import httpx
import torch
from torch import Tensor

from deepspec.data.engines.capture import MALFORMED, Captured, EngineOptions, ServerMisused, TokenLogProb, echo_problem
from deepspec.data.pool_client import Call, PoolClient, RowRejected, TryAgain
from deepspec.data.server_pool import Server

log = logging.getLogger(__name__)
PARTIAL = "Start the server with --disable-radix-cache --chunked-prefill-size -1"


class SglangHidden:
    """Adapter for servers of layers (``urls``) and servers of the last hidden state (``last_urls``)."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options

        def client(urls: Sequence[str]) -> PoolClient:
            return PoolClient(urls, model=options.model, retries=options.retries, connections=options.concurrency,
                              retry_wait=options.retry_wait, breaker=options.breaker, group="features.server")

        self._layers, self._last = client(options.urls), client(options.last_urls)
        self._proved: set[str] = set()

    async def connect(self) -> dict[str, Any]:
        model, other = await asyncio.gather(self._layers.connect(), self._last.connect())
        if model != other:
            raise ServerMisused(f"features.server.servers have model {model!r}, features.server.last_servers {other!r}")
        info = await self._layers.get(f"{self._layers.servers[0].url.removesuffix('/v1')}/server_info") or {}
        return {"engine": "sglang", "engine_version": info.get("version"), "model": model,
                "engine_quantization": info.get("quantization"), "engine_dtype": info.get("dtype")}

    async def close(self) -> None:
        for client in (self._layers, self._last):
            await client.__aexit__(None, None, None)

    @property
    def servers(self) -> list[Server]:
        return self._layers.servers + self._last.servers

    async def capture(self, token_ids: Sequence[int], row: str) -> Captured:
        ids, options = list(token_ids), self._options
        aux, last = await asyncio.gather(
            self._ask(self._layers, ids, row, len(options.layers) * options.hidden_size, logprobs=False),
            self._ask(self._last, ids, row, options.hidden_size, logprobs=True),
        )
        # The last hidden state is after the final norm for most models; the log-probabilities decide.
        return Captured(last[2], aux[0], last[0], None, last[1])

    async def _ask(self, client: PoolClient, ids: list[int], row: str, width: int, *,
                   logprobs: bool) -> tuple[Tensor, tuple[TokenLogProb, ...], str]:
        """States [T, width], log-probabilities and the server's address."""

        def body(server: Server) -> dict[str, Any]:
            # The log-probability of every token costs the server a product with the LM head: once is enough.
            start = {} if server.url in self._proved else {"logprob_start_len": 0}
            asked = {"return_logprob": True, **start} if logprobs else {}
            return {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                    "return_hidden_states": True, **asked}

        async def read(response: httpx.Response, server: Server) -> tuple[Tensor, tuple[TokenLogProb, ...], str]:
            try:
                return *await asyncio.to_thread(self._read, response, server, ids, width), server.url
            except MALFORMED as error:
                raise TryAgain(f"{server.url}: no usable reply ({type(error).__name__}: {error})") from None

        return await client.call(Call("/generate", body, self._options.timeout(len(ids)), read), row)

    def _read(self, response: httpx.Response, server: Server, ids: list[int],
              width: int) -> tuple[Tensor, tuple[TokenLogProb, ...]]:
        meta = response.json()["meta_info"]
        count, known = int(meta["prompt_tokens"]), meta.get("input_token_logprobs")
        logprobs = _logprobs(known, meta.get("output_token_logprobs"), len(ids))
        problem = echo_problem(ids, [entry[1] for entry in known]) if known else (
            None if count == len(ids) else f"{count} prompt tokens were seen, {len(ids)} were sent")
        if problem is not None:
            raise RowRejected(f"{server.url}: {problem}")
        states = self._states(server, meta.get("hidden_states"), len(ids), width)
        self._proved.add(server.url)
        return states, logprobs

    def _states(self, server: Server, values: Optional[list[Any]], tokens: int, width: int) -> Tensor:
        if not values:
            raise ServerMisused(f"{server.url} answers without meta_info.hidden_states: it was not started to return "
                                "hidden states")
        kind = RowRejected if server.url in self._proved else ServerMisused
        try:
            rows = join_rows(values)
        except (*MALFORMED, RuntimeError) as error:  # torch has RuntimeError for parts that do not fit together
            raise kind(f"{server.url}: hidden states that are no table of numbers ({error})") from None
        if rows.dim() != 2 or rows.shape[1] != width:
            raise kind(f"{server.url}: hidden states of width {rows.shape[-1]}; expected {width}. Layers must be "
                       f"--return-aux-hidden-state-layer-ids {' '.join(map(str, self._options.layers))} in "
                       "features.server.servers, and no layers in features.server.last_servers")
        if len(rows) != tokens:
            raise RowRejected(f"{server.url}: hidden states of {len(rows)} of {tokens} tokens. {PARTIAL}")
        return rows.to(getattr(torch, self._options.dtype))


def join_rows(values: list[Any]) -> Tensor:
    """[T, width] float32 from a list of rows and of lists of rows (one for every part of the prompt)."""
    parts = [torch.tensor(part, dtype=torch.float32) for part in values]
    return torch.cat([part[None] if part.dim() == 1 else part for part in parts])


def _logprobs(known: Optional[list[Any]], made: Optional[list[Any]], tokens: int) -> tuple[TokenLogProb, ...]:
    """Entries are [log-probability, token, text]; the first one of a prompt has no log-probability."""
    entries = [(position - 1, entry) for position, entry in enumerate(known or ()) if position and entry[0] is not None]
    entries += [(tokens - 1, entry) for entry in (made or ())[:1]]
    return tuple(TokenLogProb(position, int(entry[1]), float(entry[0])) for position, entry in entries)
