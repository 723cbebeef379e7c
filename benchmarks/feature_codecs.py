"""Size and error of each codec on the hidden states of a store that keeps bfloat16 or float32.

    PYTHONPATH=. python benchmarks/feature_codecs.py store=FOLDER [codecs=bf16,int8,fp8-e4m3,lossless] [samples=N]

Prints one JSON line per codec. ``of_plain`` is the share of (layers + 1) * width * 2 bytes per token that a cache of
bfloat16 with the last hidden state of every token takes; ``states`` the same for hidden states alone, where lossless
says what entropy coding saves. ``error`` is the root mean square of the difference, relative to that of the values, of
each layer and of the last hidden state; ``cosine`` the smallest cosine between a token's row and what is read back.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from deepspec.data.anchors import valid_anchors
from deepspec.data.batch import FeatureSample
from deepspec.data.feature_format import Record, StoreHeader
from deepspec.data.feature_records import decode_record, encode_record
from deepspec.data.feature_store import FeatureStore


class Errors:
    """Sums over samples, by layer."""

    def __init__(self) -> None:
        self.squares: dict[str, list[float]] = {}
        self.cosine = 1.0

    def add(self, name: str, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Rows [R, D] of a layer before and after."""
        exact, found = exact.double(), found.double()
        sums = self.squares.setdefault(name, [0.0, 0.0])
        sums[0] += float((found - exact).square().sum())
        sums[1] += float(exact.square().sum())
        if exact.numel():
            self.cosine = min(self.cosine, float(torch.cosine_similarity(exact, found, dim=-1).min()))

    def relative(self) -> dict[str, float]:
        """Root mean square error over root mean square, by layer."""
        return {name: round((wrong / all_of_it) ** 0.5, 6) for name, (wrong, all_of_it) in self.squares.items()}


def joined(pieces: list) -> "torch.Tensor":
    """The bytes of a record."""
    return torch.frombuffer(bytearray(b"".join(bytes(piece) for piece in pieces)), dtype=torch.uint8)


def measure(store: FeatureStore, codec: str, count: int) -> dict:
    """One codec over the first ``count`` samples."""
    header: StoreHeader = replace(store.header, codec=codec)
    errors, tokens, size, states, plain_states, seconds = Errors(), 0, 0, 0, 0, 0.0
    for index in range(count):
        item = store.read(index)
        started = time.perf_counter()
        record, pieces = encode_record(header, item.sample, "train", item.features, item.last_hidden)
        seconds += time.perf_counter() - started
        raw = joined(pieces).numpy()
        again = decode_record(header, record, raw)
        compare(errors, header, item, again)
        tokens, size = tokens + record.tokens, size + len(raw)
        states += state_bytes(header, record)
        plain_states += state_bytes(replace(header, codec="bf16"), record)
    layers, width = len(header.layers), header.hidden_size
    return {
        "codec": codec, "bytes_per_token": round(size / tokens, 1),
        "of_plain": round(size / tokens / ((layers + 1) * width * 2), 4), "states": round(states / plain_states, 4),
        "error": errors.relative(), "cosine": round(errors.cosine, 6),
        "encode_megabytes_per_second": round(plain_states / seconds / 1e6, 1), "samples": count, "tokens": tokens,
        "layers": list(header.layers), "width": width,
    }


def state_bytes(header: StoreHeader, record: Record) -> int:
    """Bytes of hidden states and what belongs to them, without ids, mask and alignment."""
    layout = header.layout(record.tokens, record.label_rows, record.coded)
    return sum(section.size for section in (layout.features, layout.feature_extra, layout.hidden, layout.hidden_extra))


def compare(errors: Errors, header: StoreHeader, exact: FeatureSample, found: FeatureSample) -> None:
    """Add one sample."""
    rows = valid_anchors(exact.sample.loss_mask)
    before, after = (item.features.unflatten(-1, (len(header.layers), -1)) for item in (exact, found))
    for place, layer in enumerate(header.layers):
        errors.add(f"layer {layer}", before[:, place], after[:, place])
    errors.add("last hidden", exact.last_hidden[rows], found.last_hidden[rows])


def main(arguments: list[str]) -> None:
    options = {"codecs": "bf16,int8,fp8-e4m3,lossless", "samples": "0", "store": ""}
    options |= dict(argument.partition("=")[::2] for argument in arguments)
    if not options["store"]:
        sys.exit("store=FOLDER names the feature store whose hidden states are measured")
    store = FeatureStore(Path(options["store"]))
    if store.header.codec not in ("bf16", "fp32", "lossless"):
        sys.exit(f"{options['store']} keeps {store.header.codec}: the values before that are not known")
    count = int(options["samples"]) or len(store)
    for codec in options["codecs"].split(","):
        print(json.dumps({"benchmark": "feature_codecs", **measure(store, codec, min(count, len(store)))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
