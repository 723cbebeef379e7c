"""Bytes, writing and reading of the feature store, per codec, against plain sequential reading in the same run.

    PYTHONPATH=. python benchmarks/feature_store.py [name=value ...]

Names: codecs (comma-separated), width, layers, tokens (of a sample), prompt (share of them), samples, repeats, threads,
directory (where the store is written and read; default: the system's temporary folder), shard_megabytes, pack (samples
asked for at a time), dtype (bfloat16 or float32), clock (wall, or cpu: seconds of all threads of this process, for a
machine that is busy with other things).

Prints one JSON line per codec. Hidden states are those of a transformer with random weights of that width, so the share
of the lossless codec is that of such a model. ``of_plain`` is the share of (layers + 1) * width * 2 bytes per token,
which is what DeepSpec's cache stores besides ids and masks. All rates are GB/s of stored bytes, best of ``repeats``;
cold: after the system was asked to forget the files. ``sequential`` reads the files from begin to end into a buffer of
4 MB. The others read all samples, ``pack`` at a time, checksums verified:

    loader    in the order of the files, as views of them: what the packs of training are made from
    shuffled  the same in random order
    gpu_pack  packs as they are sent to a GPU, which decodes them: one copy of the stored bytes
    cpu_pack  packs decoded to ``dtype``

and ``widen`` is the ceiling of ``cpu_pack``: PyTorch's plain conversion of as many int8 values (2-byte codecs: bfloat16
values) to ``dtype``, in memory, no scale, no reading.
"""

import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Optional

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

from deepspec import artifacts  # noqa: E402
from deepspec.data.batch import Sample  # noqa: E402
from deepspec.data.collate import collate  # noqa: E402
from deepspec.data.feature_codec import SCALED  # noqa: E402
from deepspec.data.feature_format import INDEX, PRODUCER, StoreHeader, estimate_bytes  # noqa: E402
from deepspec.data.feature_shards import FeatureWriter, join_index  # noqa: E402
from deepspec.data.sources import CachedFeatures  # noqa: E402

DEFAULTS: dict[str, Any] = {
    "codecs": "bf16,int8,fp8-e4m3,lossless", "width": 2560, "layers": 5, "tokens": 800, "prompt": 0.3, "samples": 24,
    "repeats": 5, "threads": 2, "directory": tempfile.gettempdir(), "shard_megabytes": 128, "pack": 4,
    "dtype": "bfloat16", "clock": "wall",
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BLOCK = 4 << 20


def hidden_states(tokens: int, layers: int, width: int) -> Tensor:
    """[tokens, layers + 1, width] bfloat16 of a random transformer."""
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=1024, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers + 1,
                         num_attention_heads=width // 64, num_key_value_heads=width // 64, head_dim=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        states = model(torch.randint(0, 1024, (1, tokens)), output_hidden_states=True).hidden_states
    return torch.stack([state[0] for state in states[1:layers + 2]], dim=1)


def write(folder: Path, header: StoreHeader, samples: list[Sample], states: Tensor, shard_bytes: int) -> float:
    """Seconds to write and sync every sample; each has the states in another order of tokens."""
    writer = FeatureWriter(folder, header, shard_bytes=shard_bytes)
    seconds = 0.0
    for index, sample in enumerate(samples):
        rolled = states.roll(index * 37, dims=0)
        features, last = rolled[:, :-1].flatten(1), rolled[:, -1].contiguous()
        started = time.perf_counter()
        writer.write(sample, "train", features, last)
        seconds += time.perf_counter() - started
    started = time.perf_counter()
    writer.close()
    seconds += time.perf_counter() - started
    manifest = artifacts.begin(folder, PRODUCER, "benchmark", facts={"header": header.to_json()})
    shards = join_index(folder, [sample.sample_id for sample in samples], set())
    artifacts.complete(folder, manifest, [INDEX], {"shards": shards})
    return seconds


def forget(files: list[Path]) -> None:
    """Ask the system to drop the files from its cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sequential(files: list[Path]) -> None:
    """Every byte once, in order."""
    buffer = bytearray(BLOCK)
    for path in files:
        with open(path, "rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def load(folder: Path, options: dict, shuffled: bool = False, decode: Optional[bool] = None) -> None:
    """Every sample once, in the order of the files or in random order; in packs unless ``decode`` is None."""
    source = CachedFeatures(folder, dtype=getattr(torch, options["dtype"]))
    order = list(range(len(source)))
    if shuffled:
        random.Random(0).shuffle(order)
    for begin in range(0, len(order), options["pack"]):
        samples = source.get_stored(order[begin:begin + options["pack"]])
        if decode is not None:
            collate(samples, num_anchors=1, draft_length=1, seed=0, epoch=0, decode=decode)


def best(works: dict[str, Callable[[], None]], before: Callable[[], None], options: dict) -> dict[str, float]:
    """Fewest seconds of each. They take turns, so that a machine busy for a while slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    clock = CLOCKS[options["clock"]]
    for _ in range(options["repeats"]):
        for name, work in works.items():
            before()
            started = clock()
            work()
            seconds[name].append(clock() - started)
    return {name: min(found) for name, found in seconds.items()}


def widen(options: dict, codec: str) -> float:
    """GB/s of stored bytes when a pack of them is merely converted to the dtype of the pack."""
    stored = torch.int8 if codec in SCALED else torch.bfloat16
    shape = (options["pack"] * options["tokens"], options["layers"] * options["width"])
    values, out = torch.ones(shape, dtype=stored), torch.empty(shape, dtype=getattr(torch, options["dtype"]))

    def copy() -> None:
        out.copy_(values)

    fewest = best({"widen": copy}, lambda: None, options)
    return values.nbytes / fewest["widen"] / 1e9


def measure(codec: str, options: dict, states: Tensor) -> dict:
    """One codec: written, read cold and warm, removed."""
    layers, width, tokens = options["layers"], options["width"], options["tokens"]
    prompt = round(tokens * options["prompt"])
    mask = torch.tensor([False] * prompt + [True] * (tokens - prompt))
    samples = [Sample(f"sample-{index:06d}", "chat", torch.arange(tokens), mask) for index in range(options["samples"])]
    header = replace(StoreHeader("t", "r", "r", tuple(range(layers)), width, "bf16", "bfloat16"), codec=codec)
    folder = Path(tempfile.mkdtemp(prefix="feature-store-", dir=options["directory"]))
    try:
        seconds = write(folder, header, samples, states, options["shard_megabytes"] * 2**20)
        files = sorted(folder.glob("shard-*.bin"))
        size = sum(path.stat().st_size for path in files)
        written = sum(path.stat().st_size for path in folder.iterdir() if path.name != artifacts.MANIFEST)
        total, plain = tokens * len(samples), (layers + 1) * width * 2
        result = {
            "codec": codec, "bytes_per_token": round(written / total, 1), "of_plain": round(written / total / plain, 4),
            "estimate_error": round(estimate_bytes(header, samples) / written - 1, 4),
            "write_megabytes_per_second": round(size / seconds / 1e6, 1),
            "write_tokens_per_second": round(total / seconds),
        }
        for name, before in (("cold", lambda: forget(files)), ("warm", lambda: None)):
            works: dict[str, Callable[[], None]] = {
                "sequential": lambda: sequential(files), "loader": lambda: load(folder, options),
                "shuffled": lambda: load(folder, options, shuffled=True),
                "gpu_pack": lambda: load(folder, options, decode=False),
                "cpu_pack": lambda: load(folder, options, decode=True),
            }
            rates = {what: size / least / 1e9 for what, least in best(works, before, options).items()}
            result |= {f"{what}_{name}_gigabytes_per_second": round(rate, 3) for what, rate in rates.items()}
            result |= {f"{what}_share_{name}": round(rates[what] / rates["sequential"], 3)
                       for what in ("loader", "gpu_pack", "cpu_pack")}
        return result | {"widen_gigabytes_per_second": round(widen(options, codec), 3)}
    finally:
        shutil.rmtree(folder)


def main(arguments: list[str]) -> None:
    options = dict(DEFAULTS)
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in DEFAULTS:
            sys.exit(f"unknown name {name!r}; there are {', '.join(DEFAULTS)}")
        options[name] = type(DEFAULTS[name])(value)
    torch.set_num_threads(options["threads"])
    states = hidden_states(options["tokens"], options["layers"], options["width"])
    for codec in options["codecs"].split(","):
        line = {"benchmark": "feature_store", **measure(codec, options, states),
                **{name: value for name, value in options.items() if name not in ("codecs", "directory")},
                "machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
