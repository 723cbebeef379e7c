"""Caches of speculators: a saved dataset (Arrow) and ``hs_<i>.safetensors`` of its row i, beside it or in
``hidden_states``.

The dataset has ``input_ids`` and ``loss_mask``; a file has ``token_ids`` [T] and ``hidden_states`` [T, M+1, D]. Layer
ids there are ours + 1 (what a layer reads instead of what it gives). The last of the M+1 is the last layer's output
before the final norm.
"""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspec.data.batch import FeatureSample
from deepspec.data.features.cache import Normalise, check_rows, dtype_name, fingerprint_files, make_sample
from deepspec.errors import InputRefused

_NAME = re.compile(r"hs_(\d+)\.safetensors")


class SpeculatorsCache:
    """Reads one file per sample; rows of the dataset that have none are not part of it."""

    def __init__(self, directory: Path, domain: str, layers: tuple[int, ...], normalise: Normalise) -> None:
        self.directory, self._domain, self._normalise = directory, domain, normalise
        if min(layers) < 1:
            raise InputRefused(f"layers {list(layers)}: 0 is the embedding there, which has no counterpart here.")
        self.layers = tuple(layer - 1 for layer in layers)
        folder = directory / "hidden_states" if (directory / "hidden_states").is_dir() else directory
        found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        if not found:
            raise InputRefused(f"{folder} has no hs_<i>.safetensors: it is not a cache of speculators.")
        self._numbers = sorted(found)
        self._paths = [found[number] for number in self._numbers]
        self._rows = _dataset(directory)
        if self._numbers[-1] >= len(self._rows):
            raise InputRefused(f"{self._paths[-1]}: the dataset in {directory} has only {len(self._rows)} rows.")
        self.stored_bytes = sum(path.stat().st_size for path in self._paths)
        self.fingerprint = fingerprint_files(self._paths, directory)
        hidden = _load(self._paths[0])[1]
        self.hidden_size, self.dtype = hidden.shape[-1], dtype_name(hidden.dtype)

    def __len__(self) -> int:
        return len(self._paths)

    def sample_id(self, index: int) -> str:
        """The number of the dataset's row."""
        return f"speculators-{self._numbers[index]:08d}"

    def read(self, index: int) -> FeatureSample:
        """Raises InputRefused for a file that is cut short, of other tokens than its row, or shorter than it."""
        path = self._paths[index]
        token_ids, hidden = _load(path)
        row = self._rows.slice(self._numbers[index], 1).to_pylist()[0]
        if token_ids.tolist() != list(row["input_ids"]):
            raise InputRefused(f"{path}: {len(token_ids)} token ids that are not the {len(row['input_ids'])} of row "
                               f"{self._numbers[index]} of the dataset.")
        sample = make_sample(str(path), self.sample_id(index), self._domain, token_ids,
                             torch.tensor(row["loss_mask"], dtype=torch.int64))
        if hidden.dim() != 3 or hidden.shape[1] != len(self.layers) + 1 or hidden.shape[2] != self.hidden_size:
            raise InputRefused(f"{path}: hidden states of shape {tuple(hidden.shape)}; expected "
                               f"{(len(token_ids), len(self.layers) + 1, self.hidden_size)}: {len(self.layers)} layers "
                               "and the last one.")
        return check_rows(str(path), sample, hidden[:, :-1].flatten(1), self._normalise(hidden[:, -1]),
                          len(self.layers))


def _load(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with safe_open(path, framework="pt") as handle:
            return handle.get_tensor("token_ids"), handle.get_tensor("hidden_states")
    except (OSError, SafetensorError) as error:
        raise InputRefused(f"{path} cannot be read ({error}). Was its writer killed?") from None


def _dataset(directory: Path) -> Any:
    """The saved dataset's two columns as an Arrow table, memory-mapped."""
    try:
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        parts = []
        for entry in state["_data_files"]:
            with pa.memory_map(str(directory / entry["filename"])) as source:
                parts.append(pa.ipc.open_stream(source).read_all().select(["input_ids", "loss_mask"]))
        return pa.concat_tables(parts)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise InputRefused(f"{directory} has no saved dataset with input_ids and loss_mask ({type(error).__name__}: "
                           f"{error}). Give the folder that holds state.json and the *.arrow files.") from None
