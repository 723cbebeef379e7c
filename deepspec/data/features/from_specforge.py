"""Caches of SpecForge: one ``data_<i>.ckpt`` (or ``.ckpt.gz``) per sample, in folders ``rows_<a>-<b>``.

Each is a torch file with ``input_ids`` [T], ``loss_mask`` [T], ``aux_hidden_state`` [1, T, M*D] and ``hidden_state``
[1, T, D], the last one after the final norm. Layer ids are ours; the files do not name them.
"""

import gzip
import pickle
import re
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from deepspec.data.batch import FeatureSample
from deepspec.data.features.cache import check_rows, dtype_name, fingerprint_files, make_sample
from deepspec.errors import InputRefused

_NAME = re.compile(r"data_(\d+)\.ckpt(\.gz)?")
_KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")


class SpecForgeCache:
    """Reads one file per sample, tensors only (nothing in a file is executed)."""

    def __init__(self, directory: Path, domain: str, layers: tuple[int, ...]) -> None:
        self.directory, self._domain, self.layers = directory, domain, layers
        found: dict[int, Path] = {}
        for path in directory.rglob("data_*.ckpt*"):
            if match := _NAME.fullmatch(path.name):
                if (number := int(match[1])) in found:
                    raise InputRefused(f"{directory}: {path.name} occurs twice, in {found[number].parent.name} and "
                                       f"{path.parent.name}.")
                found[number] = path
        if not found:
            raise InputRefused(f"{directory} has no data_<i>.ckpt: it is not a cache of SpecForge.")
        self._numbers = sorted(found)
        self._paths = [found[number] for number in self._numbers]
        self.stored_bytes = sum(path.stat().st_size for path in self._paths)
        self.fingerprint = fingerprint_files(self._paths, directory)
        last = _load(self._paths[0])["hidden_state"]
        self.hidden_size, self.dtype = last.shape[-1], dtype_name(last.dtype)

    def __len__(self) -> int:
        return len(self._paths)

    def sample_id(self, index: int) -> str:
        """The number in the file's name."""
        return f"specforge-{self._numbers[index]:08d}"

    def read(self, index: int) -> FeatureSample:
        """Raises InputRefused for a file that is cut short or holds fewer rows than tokens."""
        path = self._paths[index]
        tensors = _load(path)
        sample = make_sample(str(path), self.sample_id(index), self._domain, tensors["input_ids"].reshape(-1),
                             tensors["loss_mask"].reshape(-1))
        features, last = (_single(path, name, tensors[name]) for name in ("aux_hidden_state", "hidden_state"))
        if last.shape[-1] != self.hidden_size:
            raise InputRefused(f"{path}: hidden states of width {last.shape[-1]}, the first file has "
                               f"{self.hidden_size}.")
        return check_rows(str(path), sample, features, last, len(self.layers))


def _single(path: Path, name: str, values: Tensor) -> Tensor:
    if values.dim() != 3 or len(values) != 1:
        raise InputRefused(f"{path}: {name} has shape {tuple(values.shape)}, expected one sample: (1, tokens, width).")
    return values[0]


def _load(path: Path) -> dict[str, Tensor]:
    try:
        content = BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path
        tensors = torch.load(content, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        first = str(error).strip().split("\n")[0]
        raise InputRefused(f"{path} cannot be read ({type(error).__name__}: {first}). Was its writer killed?") from None
    missing = [name for name in _KEYS if not isinstance(tensors, dict) or not isinstance(tensors.get(name), Tensor)]
    if missing:
        raise InputRefused(f"{path} lacks the tensors {', '.join(missing)}: it is not a sample of SpecForge with "
                           "layers of the target.")
    return tensors
