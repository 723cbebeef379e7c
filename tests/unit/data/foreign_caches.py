"""Tiny caches in the layouts of DeepSpec, SpecForge and speculators, with the hidden states of a real target."""

import gzip
import io
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepspec.targets.frozen import FrozenTarget

LAYERS, WIDTH = (0, 2), 64


@dataclass
class Row:
    ids: Tensor  # [T]
    mask: Tensor  # [T]
    features: Tensor  # [T, M*D]
    last: Tensor  # [T, D] after the final norm
    raw: Tensor  # [T, D] before it


def make_rows(target: FrozenTarget, count: int = 6) -> list[Row]:
    """The fifth one has no place for a block."""
    made = []
    before: list[Tensor] = []
    hook = target.layers[-1].register_forward_hook(
        lambda module, given, out: before.append((out[0] if isinstance(out, tuple) else out)[0]))
    for index in range(count):
        ids = torch.arange(10 + index) * (7 + index) % 500
        before.clear()
        encoded = target.encode(ids, [len(ids)])
        mask = torch.tensor([0] * 4 + [1] * (len(ids) - 4))
        made.append(Row(ids, mask, encoded.features, encoded.last_hidden, before[0]))
    hook.remove()
    made[4].mask[:] = 0
    return made


def deepspec_cache(root: Path, rows: list[Row], change: Optional[Callable[[dict[str, Any]], None]] = None) -> Path:
    """Two shards; hidden states in bfloat16, nothing aligned."""
    root.mkdir()
    index, shards = b"", [b"", b"x"]
    for number, row in enumerate(rows):
        shard = number % 2
        parts = (row.ids.int(), torch.ones(len(row.ids), dtype=torch.uint8), row.mask.to(torch.uint8),
                 row.features.bfloat16(), row.last.bfloat16())
        offsets = []
        for part in parts:
            offsets.append(len(shards[shard]))
            shards[shard] += part.contiguous().view(torch.uint8).numpy().tobytes()
        index += struct.pack("<QIIQQQQQ", number, shard, len(row.ids), *offsets)
    manifest = {
        "version": 2, "num_samples": len(rows), "num_shards": 2, "target_layer_ids": list(LAYERS), "hidden_size": WIDTH,
        "hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": 56,
        "target_model_name_or_path": "tiny",
        "shards": [{"shard_id": shard, "file_name": f"shard-{shard:05d}.bin"} for shard in range(2)],
    }
    if change:
        change(manifest)
    (root / "manifest.json").write_text(json.dumps(manifest))
    (root / "samples.idx").write_bytes(index)
    for shard, content in enumerate(shards):
        (root / f"shard-{shard:05d}.bin").write_bytes(content)
    return root


def specforge_cache(root: Path, rows: list[Row]) -> Path:
    for number, row in enumerate(rows):
        path = root / f"rows_{number // 4 * 4}-{number // 4 * 4 + 4}" / f"data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"input_ids": row.ids, "loss_mask": row.mask, "hidden_state": row.last[None].bfloat16(),
                  "aux_hidden_state": row.features[None].bfloat16()}
        if number == 3:
            buffer = io.BytesIO()
            torch.save(values, buffer)
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(buffer.getvalue()))
        else:
            torch.save(values, path)
    return root


def speculators_cache(root: Path, rows: list[Row], skip: tuple[int, ...] = ()) -> Path:
    (root / "hidden_states").mkdir(parents=True)
    table = pa.table({"input_ids": [row.ids.tolist() for row in rows], "loss_mask": [row.mask.tolist() for row in rows],
                      "seq_len": [len(row.ids) for row in rows]})
    halves = (table.slice(0, 2), table.slice(2))
    names = [f"data-{part:05d}-of-00002.arrow" for part in range(2)]
    for name, half in zip(names, halves):
        with pa.OSFile(str(root / name), "wb") as sink, pa.ipc.new_stream(sink, half.schema) as writer:
            writer.write_table(half)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for number, row in enumerate(rows):
        if number not in skip:
            stacked = torch.cat([row.features.unflatten(1, (2, WIDTH)), row.raw[:, None]], dim=1)
            save_file({"token_ids": row.ids, "hidden_states": stacked.bfloat16().contiguous()},
                      root / "hidden_states" / f"hs_{number}.safetensors")
    return root


MAKERS: dict[str, Callable[..., Path]] = {
    "deepspec": deepspec_cache, "specforge": specforge_cache, "speculators": speculators_cache,
}
IDS = {"deepspec": [], "specforge": ["--layers", "0,2"], "speculators": ["--layers", "1,3"]}
