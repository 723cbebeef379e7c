"""Speed and memory of regeneration: short rows through a fake fast server, then joined in prompt order.

    PYTHONPATH=. python benchmarks/regenerate.py [rows=20000] [concurrency=64] [delay_ms=0]

Prints one JSON line. The server is a process of its own that answers at once (or after a delay) with token ids; rows
per second are those of the client, all its work included: rendering, requests, checks and durable rows. Memory is the
growth of the peak resident set while the rows are answered, for a quarter of the rows and for all of them, each in a
process of its own; the rows themselves are read before. ``join_growth`` is the same for the joining at the end.
"""

import asyncio
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deepspec.data.dialogue import AnswerLimits
from deepspec.data.jsonl import dump_row
from deepspec.data.parts import PartWriter, answered, join_parts, mine, prepare_parts
from deepspec.data.prompts import PromptRow, read_prompts
from deepspec.data.rendering import Renderer
from deepspec.data.server_job import Request, answer_from_servers
from deepspec.targets.sampling import Sampling

DEFAULTS = {"rows": 20000, "concurrency": 64, "delay_ms": 0}
END = 1
TEMPLATE = ("{% for message in messages %}{{ message.role + ': ' + message.content + '<end>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
ANSWER = json.dumps({
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "the quick fox"},
                 "token_ids": [*range(100, 120), END]}],
}).encode()


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(["the quick brown fox"], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """One connection: the list of models, or the same answer to everything."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if length:
                await reader.readexactly(int(length[0].split(b":")[1]))
                await asyncio.sleep(delay)
            body = ANSWER if length else b'{"data": [{"id": "tiny"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(port: Any, delay: float) -> None:
    """Until it is ended."""

    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: _talk(reader, writer, delay), "127.0.0.1", 0,
                                            backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class Peak:
    """Growth of the resident set while it is watched, in bytes."""

    def __init__(self) -> None:
        self._process, self._stop = psutil.Process(), threading.Event()
        self._start = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def end(self) -> int:
        """The growth."""
        self._stop.set()
        self._thread.join()
        return self._peak - self._start


def measure(folder: str, count: int, concurrency: int, port: int, results: Any) -> None:
    """Answer and join once; puts (seconds, growth, seconds of the join, its growth, stored rows) into ``results``."""
    place, renderer = Path(folder) / str(count), Renderer(tokenizer())
    prompts = list(read_prompts(place))
    prepare_parts(place)
    request = Request(Sampling(0.7, 0.8, 20, 0), None, (END,), 300)

    def answer(rows: Iterator[PromptRow]) -> None:
        with PartWriter(place) as writer:
            answer_from_servers([f"http://127.0.0.1:{port}/v1"], rows, renderer, writer, request,
                                AnswerLimits(64, 4096), model=None, concurrency=concurrency, retries=0,
                                seconds_per_token=1.0, failure_limit=0)

    answer(iter(prompts[:200]))  # what the first requests load and connect does not grow with the rows
    todo = mine(prompts, answered(place), 0, 1)
    peak, began = Peak(), time.perf_counter()
    answer(todo)
    seconds, growth = time.perf_counter() - began, peak.end()
    peak, began = Peak(), time.perf_counter()
    stored = join_parts(place, prompts, drop_truncated=False)["rows"]
    results.put((seconds, growth, time.perf_counter() - began, peak.end(), stored))


def main() -> None:
    """Two sizes, each in a process of its own, against one server."""
    values = dict(DEFAULTS)
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name not in values:
            sys.exit(f"{argument!r}: there are {', '.join(values)}")
        values[name] = int(value)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("spawn")
    port, sender = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(sender, values["delay_ms"] / 1000), daemon=True)
    server.start()
    address, rows, found = port.recv(), values["rows"], {}
    with tempfile.TemporaryDirectory() as folder:
        for count in (rows // 4, rows):
            place = Path(folder) / str(count)
            place.mkdir()
            with open(place / "prompts.jsonl", "wb") as handle:
                for index in range(count):
                    messages = ({"role": "user", "content": f"the quick brown fox {index}"}, {"role": "assistant"})
                    handle.write(dump_row(PromptRow(f"id-{index}", "chat", "train", "own", messages).to_json()))
            results = context.Queue()
            child = context.Process(target=measure, args=(folder, count, values["concurrency"], address, results))
            child.start()
            found[count] = results.get(timeout=1800)
            child.join()
    server.terminate()
    (_, few, _, few_join, _), (seconds, many, join_seconds, many_join, stored) = found[rows // 4], found[rows]
    print(json.dumps({
        **values, "stored": stored, "rows_per_second": round((rows - 200) / seconds), "seconds": round(seconds, 2),
        "growth_megabytes": round(many / 1e6, 1), "growth_megabytes_at_a_quarter": round(few / 1e6, 1),
        "bytes_per_row": max(0, round((many - few) / (rows - rows // 4))), "join_seconds": round(join_seconds, 2),
        "join_growth_megabytes": round(many_join / 1e6, 1),
        "join_bytes_per_row": max(0, round((many_join - few_join) / (rows - rows // 4))),
        "machine": platform.machine(),
    }))


if __name__ == "__main__":
    main()
