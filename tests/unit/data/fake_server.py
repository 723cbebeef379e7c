"""An OpenAI-compatible server in a thread, as obliging or as broken as a test wants it."""

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Optional

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def reply(content: Optional[str] = "fine", reason: Optional[str] = "stop", **extra: Any) -> dict[str, Any]:
    """Body of a chat completion; ``extra`` goes into the message, except prompt_token_ids and token_ids."""
    body: dict[str, Any] = {}
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if "prompt_token_ids" in extra:
        body["prompt_token_ids"] = extra.pop("prompt_token_ids")
    if "token_ids" in extra:
        choice["token_ids"] = extra.pop("token_ids")
    choice["message"] = {"role": "assistant", "content": content, **extra}
    return body | {"choices": [choice]}


def last_user(body: dict[str, Any]) -> str:
    """Text of the last user turn of a request."""
    return [message["content"] for message in body["messages"] if message["role"] == "user"][-1]


class _Quick(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256


class FakeServer:
    """``answer(request body)`` returns a body, or {"status": code, "text": ...}, or {"raw": bytes, "length": what the
    header claims}; use as a context manager. ``bind``: whether the port is open before ``open`` is called."""

    def __init__(self, answer: Answer, models: tuple[str, ...] = ("tiny",), port: int = 0, bind: bool = True) -> None:
        self.requests: list[dict[str, Any]] = []
        self.most_in_flight = self._in_flight = 0
        self._lock, self._answer, self._models = threading.Lock(), answer, models
        self._http = _Quick(("127.0.0.1", port), self._handler(), bind_and_activate=bind)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._open: set[socket.socket] = set()

    def open(self) -> None:
        """Bind and serve."""
        self._http.server_bind()
        self._http.server_activate()
        self._thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                server._open.add(self.connection)

            def finish(self) -> None:
                server._open.discard(self.connection)
                super().finish()

            def do_GET(self) -> None:  # noqa: N802
                self._send(200, {"data": [{"id": name} for name in server._models]})

            def do_POST(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append(body)
                    server._in_flight += 1
                    server.most_in_flight = max(server.most_in_flight, server._in_flight)
                try:
                    found = server._answer(body)
                finally:
                    with server._lock:
                        server._in_flight -= 1
                if "raw" in found:
                    return self._send_raw(200, found["raw"], found["length"])
                failed = "status" in found
                self._send(found.get("status", 200), {"error": found.get("text", "")} if failed else found)

            def _send(self, status: int, body: dict[str, Any]) -> None:
                self._send_raw(status, json.dumps(body, ensure_ascii=False).encode())

            def _send_raw(self, status: int, payload: bytes, length: Optional[int] = None) -> None:
                self.close_connection = self.close_connection or length is not None
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(length or len(payload)))
                    self.end_headers()
                    self.wfile.write(payload)
                except OSError:
                    return  # the client gave up, which is what some tests are about

            def log_message(self, *_: object) -> None:
                return

        return Handler

    def stop(self) -> None:
        """Close the port and what is connected to it, as the end of a process does."""
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def delayed(seconds: float, body: dict[str, Any]) -> dict[str, Any]:
    """``body`` after a while."""
    time.sleep(seconds)
    return body
