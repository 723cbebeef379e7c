"""Hidden states from vLLM's ``extract_hidden_states``, which writes them to files in a folder that both sides see.

Recorded from vLLM 0.32 (ExampleHiddenStatesConnector). A completion of one token is asked for; the reply names a file
with ``token_ids`` [T] and ``hidden_states`` [T, M+1, D] in ``kv_transfer_params.hidden_states_path``. Layer ids there
are ours + 1 (what a layer reads), and the last one, the number of layers, is before the final norm.
"""

import asyncio
import logging
import time
import uuid
from pathlib import Path
from typing import Any, Optional, Sequence

import httpx
import torch
from torch import Tensor

from deepspec.data.engines.capture import MALFORMED, Captured, EngineOptions, ServerMisused, TokenLogProb, echo_problem
from deepspec.data.engines.vllm_files import FileProblem, sweep, take
from deepspec.data.pool_client import Call, PoolClient, RowRejected, TryAgain
from deepspec.data.server_pool import Server
from deepspec.targets.quantization import folder_quantization

log = logging.getLogger(__name__)
CACHING = "start it with --no-enable-prefix-caching"
_STALE = 60.0  # seconds by which clocks and the starts of ranks may differ


def engine_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Our layer ids as vLLM counts them, then the last layer's output."""
    return [layer + 1 for layer in layers] + [num_layers]


class VllmHidden:
    """Adapter for one or more vLLM servers with the same layers."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._client = PoolClient(options.urls, model=options.model, retries=options.retries,
                                  connections=options.concurrency, retry_wait=options.retry_wait,
                                  breaker=options.breaker, group="features.server")
        self._proved: set[str] = set()  # servers whose first reply was right
        self._swept: set[Path] = set()
        self._started = time.time()
        self._closed = False

    async def connect(self) -> dict[str, Any]:
        model = await self._client.connect()
        url = self._client.servers[0].url
        version = await self._client.get(f"{url.removesuffix('/v1')}/version") or {}
        listed = (await self._client.get(f"{url}/models") or {}).get("data", [])  # in this form: connect has read it
        roots = [entry.get("root") for entry in listed if entry.get("id") == model]  # what it was started with
        return {"engine": "vllm", "engine_version": version.get("version"), "model": model,
                "model_root": roots[0] if roots else None,
                "engine_quantization": folder_quantization(roots[0]) if roots else None}

    async def close(self) -> None:
        self._closed = True
        await self._client.__aexit__(None, None, None)

    @property
    def servers(self) -> list[Server]:
        return self._client.servers

    async def capture(self, token_ids: Sequence[int], row: str) -> Captured:
        ids = list(token_ids)
        seconds = self._options.timeout(len(ids))

        def body(server: Server) -> dict[str, Any]:
            # The log-probability of every token costs the server a product with the LM head: once is enough.
            first = {} if server.url in self._proved else {"prompt_logprobs": 1}
            return {"prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True, "logprobs": 1, **first}

        async def read(response: httpx.Response, server: Server) -> Captured:
            try:
                return await self._read(response, server, ids, seconds)
            except MALFORMED as error:
                raise TryAgain(f"{server.url}: no usable reply ({type(error).__name__}: {error})") from None

        name = f"{self._options.job}-{uuid.uuid4().hex[:12]}"
        return await self._client.call(Call("completions", body, seconds, read, headers={"X-Request-Id": name}), row)

    async def _read(self, response: httpx.Response, server: Server, ids: list[int], seconds: float) -> Captured:
        reply = response.json()
        choice, transfer = reply["choices"][0], reply.get("kv_transfer_params") or {}
        named = transfer.get("hidden_states_path")
        if not isinstance(named, str):
            raise ServerMisused(f"{server.url} answers without kv_transfer_params.hidden_states_path: it was not "
                                "started to hand out hidden states")
        path = self._here(named)
        try:
            tensors = await asyncio.to_thread(take, path, seconds, lambda: self._closed, self._options.job)
        except FileProblem as problem:
            if server.url in self._proved:
                raise TryAgain(f"{server.url}: {problem}") from None
            raise ServerMisused(f"{server.url}: {problem}") from None
        self._check_ids(server, ids, choice.get("prompt_token_ids"), tensors["token_ids"])
        states = self._checked(server, ids, tensors["hidden_states"])
        logprobs = read_logprobs(choice, ids)
        self._proved.add(server.url)
        return Captured(server.url, states[:, :-1].flatten(1), states[:, -1].clone(), False, logprobs)

    def _here(self, named: str) -> Path:
        """The file on this machine. The first time, what an interrupted run of this job left there goes."""
        path = Path(named)
        if self._options.files:
            path = Path(self._options.files).expanduser() / path.name
        if path.parent not in self._swept:
            self._swept.add(path.parent)
            if removed := sweep(path.parent, self._options.job, self._started - _STALE):
                log.info("features: %d files that an interrupted run had not read are deleted from %s", removed,
                         path.parent)
        return path

    @staticmethod
    def _check_ids(server: Server, ids: list[int], echoed: Optional[list[int]], stored: Tensor) -> None:
        for where, found in (("reply", echoed), ("file", stored.tolist())):
            problem = echo_problem(ids, found) if found is not None else None
            if problem is not None:
                raise RowRejected(f"{server.url}: {where}: {problem}")

    def _checked(self, server: Server, ids: list[int], states: Tensor) -> Tensor:
        """``states`` if they are [T, M+1, D] in the target's dtype."""
        layers, width = len(self._options.layers) + 1, self._options.hidden_size
        wanted = engine_layers(self._options.layers, self._options.num_layers)
        if states.dim() != 3 or tuple(states.shape[1:]) != (layers, width):
            raise self._fault(server, f"hidden states of shape {tuple(states.shape)}; expected "
                              f"{(len(ids), layers, width)}: eagle_aux_hidden_state_layer_ids must be {wanted} there")
        if len(states) != len(ids):
            raise RowRejected(f"{server.url}: hidden states of {len(states)} of {len(ids)} tokens. If it skips tokens "
                              f"whose cache it has, {CACHING}")
        if states.dtype != getattr(torch, self._options.dtype):
            raise self._fault(server, f"hidden states are {str(states.dtype).removeprefix('torch.')}, but target.dtype "
                              f"says {self._options.dtype}. Set target.dtype to what is served, or serve with --dtype "
                              f"{self._options.dtype}")
        return states

    def _fault(self, server: Server, what: str) -> Exception:
        kind = RowRejected if server.url in self._proved else ServerMisused
        return kind(f"{server.url}: {what}")


def read_logprobs(choice: dict[str, Any], ids: Sequence[int]) -> tuple[TokenLogProb, ...]:
    """Of the prompt's own tokens where they were asked for, and of the token that was generated."""
    found = []
    try:
        for position, entry in enumerate(choice.get("prompt_logprobs") or ()):
            if entry is not None and position > 0:
                found.append(TokenLogProb(position - 1, ids[position], float(entry[str(ids[position])]["logprob"])))
        made = choice.get("token_ids") or ()
        values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        if made and values and values[0] is not None:
            found.append(TokenLogProb(len(ids) - 1, int(made[0]), float(values[0])))
    except MALFORMED as error:
        raise RowRejected(f"log-probabilities of another form ({type(error).__name__}: {error})") from None
    return tuple(found)
