"""A server in a process of its own whose answers depend on the conversation alone. Prints its address, ends with its
standard input. Says nothing to a row whose text starts with ``hang``, and 500 to one that starts with ``broken``."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "data"))

from fake_server import FakeServer, last_user, reply  # noqa: E402

WORDS = ["fox", "dog", "the", "lazy", "quick", "😀", "brown", "über", "漢字", "\u2028", "jumps"]


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Some words, sometimes cut, sometimes with reasoning; a little late, so that rows end in another order."""
    if last_user(body).startswith("hang"):
        time.sleep(3600)
    if last_user(body).startswith("broken"):
        return {"status": 500, "text": "boom"}
    said = [body["messages"], body.get("tools"), body["seed"], body.get("chat_template_kwargs")]
    digest = hashlib.blake2b(json.dumps(said).encode()).digest()
    time.sleep(digest[0] / 255 * 0.01)
    text = "so " + " ".join(WORDS[byte % len(WORDS)] for byte in digest[1:2 + digest[1] % 12])
    extra = {"reasoning_content": "so"} if digest[2] % 3 == 0 else {}
    return reply(text, "length" if digest[3] % 7 == 0 else "stop", **extra)


if __name__ == "__main__":
    with FakeServer(answer) as server:
        print(server.url, flush=True)
        sys.stdin.read()
