"""Tensors of a checkpoint folder: collected from a drafter, written as safetensors (sharded when large), read back."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspec.artifacts import atomic_write_json, write_readable
from deepspec.drafters.config_gemma4 import LAYER_SCALAR
from deepspec.drafters.types import GEMMA4, DrafterShape, SharedWeights
from deepspec.drafters.v4.release import to_release
from deepspec.drafters.vocabulary import narrowed
from deepspec.errors import InputRefused
from deepspec.export import layout

SHARD_BYTES = 5_000_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEADER_NAMES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16", "F64": "float64", "I64": "int64",
                "BOOL": "bool"}


def shared_tensors(shared: SharedWeights, dtype: torch.dtype,
                   names: tuple[str, str] = layout.SHARED_TENSORS) -> dict[str, Tensor]:
    """The target's two matrices under their published names, each with its own storage even if the target ties them."""
    return {name: tensor.detach().to("cpu", dtype).contiguous().clone()
            for name, tensor in zip(names, (shared.embed, shared.lm_head), strict=True)}


def collect(drafter: nn.Module, serving: DrafterShape, shared: SharedWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the export, in ``dtype`` on the CPU. ``serving``: the shape engines see (``serving_shape``).

    Raises InputRefused for a tensor that is empty: a ZeRO-3 placeholder that nobody gathered.
    """
    tensors = shared_tensors(shared, dtype, layout.shared_names({"deepspec_algorithm": serving.algorithm}))
    own = dict(drafter.named_parameters()) | dict(drafter.named_buffers())
    for name, parameter in own.items():
        if parameter.numel() == 0 or hasattr(parameter, "ds_id"):
            raise InputRefused(f"Drafter tensor {name} is partitioned, shape {tuple(parameter.shape)}: load it "
                               "from its checkpoint before exporting it.")
        if serving.v4 is None:
            tensors[name] = parameter.detach().to("cpu", dtype).contiguous()
    if serving.v4 is not None:
        return tensors | to_release(own, serving.num_layers, dtype)
    if serving.head == "vanilla" and "markov_head.markov_w1.weight" not in tensors:
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            tensors[name] = torch.zeros(serving.vocab_size, serving.markov_rank, dtype=dtype)
    if serving.block == GEMMA4:
        tensors |= {f"layers.{index}.{LAYER_SCALAR}": torch.ones(1, dtype=dtype)
                    for index in range(serving.num_layers)}
    return tensors if serving.draft_ids is None else narrowed(tensors, serving)


def write(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write ``tensors`` into ``folder``; more than ``shard_bytes`` become shards with an index. Returns file names."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        if filled and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensors[name]
        filled += size
    if len(shards) == 1:
        _save(shards[0], folder / SINGLE)
        return [SINGLE]
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _save(shard, folder / name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    atomic_write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [*names, INDEX]


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    write_readable(path, lambda name: save_file(dict(tensors), name, metadata={"format": "pt"}))


def files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``. Raises InputRefused when there is none or a shard is missing."""
    if (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputRefused(f"{folder / INDEX} names {missing[0]}, which is not there. Export again.")
        return [folder / name for name in names]
    if not (folder / SINGLE).is_file():
        raise InputRefused(f"{folder} has neither {SINGLE} nor {INDEX}. Export again.")
    return [folder / SINGLE]


def header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor, read from the file headers alone."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in files(folder):
        with open(path, "rb") as handle:
            try:
                length = struct.unpack("<Q", handle.read(8))[0]
                entries: dict[str, Any] = json.loads(handle.read(length))
            except (struct.error, ValueError) as error:
                raise InputRefused(f"{path} is not a safetensors file ({error}). Export again.") from None
        for name, entry in entries.items():
            if name != "__metadata__":
                found[name] = (HEADER_NAMES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
    return found


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``folder``. Raises InputRefused for a damaged file."""
    tensors: dict[str, Tensor] = {}
    for path in files(folder):
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise InputRefused(f"{path} cannot be read ({error}). Export again.") from None
    return tensors


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().data).hexdigest()
