"""A server with vLLM's interface whose rounds are made by our decoder: counters of a known drafter, healthy or not."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Callable, Optional

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.doctor.reference import RestrictedTarget
from deepspec.targets.sampling import Sampling


class FakeVllm:
    """Use as a context manager; ``url`` is its address.

    ``target`` and ``drafter`` are what this engine runs, mistakes included. ``render`` makes token ids of messages and
    template options. ``sampled`` temperatures are taken from the requests, as an engine does. No round begins where the
    sequence is longer than ``longest`` with a whole block.
    """

    def __init__(self, target: Any, drafter: Any, *, render: Optional[Callable[..., list[int]]] = None,
                 max_model_len: int = 512, longest: Optional[int] = None) -> None:
        self.target, self.drafter, self.render, self.max_model_len = target, drafter, render, max_model_len
        self.longest = longest
        length = drafter.shape.draft_length
        self.drafts, self.tokens, self.accepted = 0, 0, [0] * length
        self._requests = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeVllm":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self._server.shutdown()
        self._server.server_close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One completion, its rounds counted."""
        with self._lock:
            self._requests += 1
            sampling = Sampling(temperature=body["temperature"], seed=self._requests)
            only = body.get("allowed_token_ids")
            target = RestrictedTarget(self.target, only) if only else self.target
            decoder = SpeculativeDecoder(target, self.drafter, sampling, batch_size=1,
                                         max_new_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False))
            result, = decoder.decode([DecodeRequest(str(self._requests), tuple(body["prompt"]))])
            self.tokens += len(result.token_ids)
            length = len(body["prompt"]) + 1
            for record in result.rounds:
                if self.longest is not None and length + len(self.accepted) > self.longest:
                    break
                length += record.accepted + 1
                self.drafts += 1
                for k in range(record.accepted):
                    self.accepted[k] += 1
        return {"choices": [{"token_ids": list(result.token_ids), "finish_reason": "length"}]}

    def metrics(self) -> str:
        """Counters as Prometheus text, with the labels and the ``_created`` lines that vLLM writes."""
        label = 'engine="0",model_name="m"'
        name = "vllm:spec_decode_num_"
        lines = [
            f"# TYPE {name}drafts counter", f"{name}drafts_total{{{label}}} {float(self.drafts)}",
            f"{name}drafts_created{{{label}}} 1.7e+09",
            f"{name}draft_tokens_total{{{label}}} {float(self.drafts * len(self.accepted))}",
            f"{name}accepted_tokens_total{{{label}}} {float(sum(self.accepted))}",
            f"vllm:generation_tokens_total{{{label}}} {float(self.tokens)}",
        ] + [f'{name}accepted_tokens_per_pos_total{{{label},position="{k}"}} {float(count)}'
             for k, count in enumerate(self.accepted)]
        return "\n".join(lines) + "\n"

    def answer(self, path: str, body: Optional[dict[str, Any]]) -> Optional[Any]:
        """What is at ``path``; None for nothing."""
        if path == "/v1/models":
            return {"data": [{"id": "m", "root": "served-target", "max_model_len": self.max_model_len}]}
        if path == "/version":
            return {"version": "0.0-test"}
        if path == "/metrics":
            return self.metrics()
        if path == "/v1/completions" and body is not None:
            return self.complete(body)
        if path == "/tokenize" and body is not None and self.render is not None:
            return {"tokens": self.render(body["messages"], body.get("chat_template_kwargs") or {})}
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _reply(self, body: Optional[dict[str, Any]]) -> None:
                found = server.answer(self.path, body)
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler
