"""Speed and memory of collecting prompts: short rows through every step (redaction, decontamination, near duplicates).

    PYTHONPATH=. python benchmarks/collect_prompts.py [rows=20000] [words=30] [permutations=128]

Prints one JSON line. Memory is the growth of the peak resident set of a process of its own, for a quarter of the rows
and for all of them; ``bytes_per_row`` is the slope between the two, ``projected_gigabytes`` that slope at 1.3 million
rows (4 bytes of it per permutation are pages of a file, which the system takes back when it needs them). One row in
twenty is an exact copy, one in twenty differs from another in one word.
"""

import json
import multiprocessing
import platform
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from deepspec.config.schema import DataConfig, SourceConfig
from deepspec.data.collect import collect
from deepspec.data.decontaminate import BenchmarkFile

DEFAULTS = {"rows": 20000, "words": 30, "permutations": 128}
MILLIONS = 1.3e6


def make_rows(path: Path, count: int, length: int, seed: int) -> None:
    """A JSONL file of ``count`` prompts of ``length`` words."""
    random_state = random.Random(seed)
    endings = ("a", "em", "ila", "oro", "ust", "ind", "ept")
    words = [f"{first}{ending}" for first in "bcdfghjklmnprst" for ending in endings]
    previous = ["none"] * length
    with open(path, "w", encoding="utf-8") as handle:
        for index in range(count):
            if index % 20 == 1:
                text = list(previous)
            elif index % 20 == 2:
                text = [*previous[:-1], "changed"]
            else:
                text = previous = random_state.choices(words, k=length)
            messages = [{"role": "user", "content": " ".join(text)}]
            handle.write(json.dumps({"id": f"row-{index}", "messages": messages}) + "\n")


def measure(folder: str, count: int, length: int, permutations: int, results: "multiprocessing.Queue") -> None:
    """Collect once and put (seconds, growth of the peak in bytes, kept rows, dropped) into ``results``."""
    data = DataConfig(
        sources=[SourceConfig(name="own", kind="jsonl", path=f"{folder}/rows-{count}.jsonl")],
        near_duplicate_num_perm=permutations, redaction="builtin",
    )
    import datasketch  # noqa: F401  what it brings does not grow with the rows

    process, stop = psutil.Process(), threading.Event()
    start = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.01):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    totals = collect(data, 0, f"{folder}/out-{count}", [BenchmarkFile("own", f"{folder}/benchmark.jsonl")])
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    whole = totals.everything()
    results.put((seconds, peak - start, whole.kept, dict(whole.refused)))


def main() -> None:
    """Two sizes, each in a process of its own."""
    values = dict(DEFAULTS)
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name not in values:
            sys.exit(f"{argument!r}: there are {', '.join(values)}")
        values[name] = int(value)
    rows, length = values["rows"], values["words"]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        make_rows(Path(folder) / "benchmark.jsonl", 200, length, seed=1)
        found = {}
        for count in (rows // 4, rows):
            make_rows(Path(folder) / f"rows-{count}.jsonl", count, length, seed=0)
            results = context.Queue()
            child = context.Process(target=measure, args=(folder, count, length, values["permutations"], results))
            child.start()
            found[count] = results.get(timeout=600)
            child.join()
    (_, few, _, _), (seconds, many, kept, dropped) = found[rows // 4], found[rows]
    slope = max(0, many - few) / (rows - rows // 4)
    print(json.dumps({
        "rows": rows, "words": length, "permutations": values["permutations"], "rows_per_second": round(rows / seconds),
        "seconds": round(seconds, 2), "kept": kept, "dropped": dropped, "peak_growth_megabytes": round(many / 1e6, 1),
        "peak_growth_megabytes_at_a_quarter": round(few / 1e6, 1), "bytes_per_row": round(slope),
        "projected_gigabytes": round(slope * MILLIONS / 1e9, 2), "machine": platform.machine(),
    }))


if __name__ == "__main__":
    main()
