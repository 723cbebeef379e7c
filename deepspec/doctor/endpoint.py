"""What the doctor needs of a running engine, and which adapter speaks to it. Each engine has one file."""

import os
from dataclasses import asdict, dataclass
from typing import Any, Mapping, Optional, Protocol, Sequence

import httpx

from deepspec.config.schema_serving import DoctorConfig
from deepspec.doctor.counts import PromptCounts
from deepspec.errors import InputRefused


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself; None where it does not say."""

    engine: str
    version: Optional[str] = None
    model: Optional[str] = None  # the name requests use
    target: Optional[str] = None  # hub id or folder it loaded
    max_length: Optional[int] = None
    dtype: Optional[str] = None
    quantization: Optional[str] = None
    drafter: Optional[str] = None
    algorithm: Optional[str] = None
    draft_length: Optional[int] = None

    def to_json(self) -> dict[str, Any]:
        """As a mapping."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt. ``counts`` None: the engine reported no round for it."""

    token_ids: tuple[int, ...]
    counts: Optional[PromptCounts]
    alone: bool = True  # no other request was counted with it


class Engine(Protocol):
    """One running server."""

    facts: ServerFacts

    def totals(self) -> Optional[PromptCounts]:
        """All rounds since the server started; None where it does not count them."""

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int, only: Sequence[int] = ()) -> Answer:
        """Continue ``prompt_ids`` greedily by exactly ``max_new_tokens`` tokens, end-of-turn tokens ignored.

        ``only``: the tokens that may be answered with (empty: all); what is drafted stays free.
        """

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Optional[list[int]]:
        """The token ids the server makes of a conversation; ``options`` go to its chat template. None: not offered."""


class Http:
    """JSON over HTTP with one base URL. Raises InputRefused with the URL for whatever goes wrong."""

    def __init__(self, options: DoctorConfig) -> None:
        key = os.environ.get(options.api_key_variable, "") if options.api_key_variable else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base = str(options.endpoint).rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=base, headers=headers, timeout=options.timeout_seconds)

    def _send(self, method: str, path: str, body: Optional[Mapping[str, Any]] = None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise InputRefused(f"{self._client.base_url}{path}: {type(error).__name__} {error}. Look at the server's "
                               "log; doctor.timeout_seconds bounds one request.") from None

    def find(self, path: str) -> Optional[Any]:
        """The JSON at ``path``, None where the server has nothing there."""
        response = self._send("GET", path)
        try:
            return response.json() if response.status_code == 200 else None
        except ValueError:
            return None

    def text(self, path: str) -> Optional[str]:
        """The text at ``path``, None where the server has nothing there."""
        response = self._send("GET", path)
        return response.text if response.status_code == 200 else None

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to ``body``. Raises InputRefused for any status but 200."""
        response = self._send("POST", path, body)
        if response.status_code != 200:
            raise InputRefused(f"{self._client.base_url}{path}: HTTP {response.status_code} {response.text[:300]}. The "
                               "doctor needs the engine's own interface, not a proxy that drops fields.")
        return response.json()

    def try_ask(self, path: str, body: Mapping[str, Any]) -> Optional[Any]:
        """The answer to ``body``, None where the server refuses it or has nothing there."""
        response = self._send("POST", path, body)
        try:
            return response.json() if response.status_code == 200 else None
        except ValueError:
            return None


def connect(options: DoctorConfig) -> Engine:
    """The engine at ``doctor.endpoint``. Raises InputRefused for a server that is neither vLLM nor SGLang."""
    from deepspec.doctor.sglang import SglangEngine
    from deepspec.doctor.vllm import VllmEngine

    http = Http(options)
    kind = options.engine
    if kind == "auto":
        kind = "sglang" if http.find("/get_server_info") is not None else "vllm"
    if kind == "sglang":
        return SglangEngine(http, options.model)
    return VllmEngine(http, options.model)
