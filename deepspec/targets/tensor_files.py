"""The files of a model's folder, read tensor by tensor, and the fingerprint they give without the model in memory."""

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterable, Optional

from safetensors import safe_open
from torch import Tensor

from deepspec.errors import InputRefused
from deepspec.targets.folder import INDEX, SINGLE, check_folder, safetensors_keys
from deepspec.targets.identity import hash_config, hash_tensor

log = logging.getLogger(__name__)
_RELEASED = {"lm_head": ("head",), "embed_tokens": ("embed", "tok_embeddings")}  # names in DeepSeek's own releases
_NOT_ENDS = {"layers", "mtp", "vision_tower", "audio_tower", "visual", "vision_model"}  # what has norms of its own


class TensorFiles:
    """The tensors of a model's folder, read one by one through memory maps."""

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        index = folder / INDEX
        if index.is_file():
            shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._where = {name: folder / file for name, file in shards.items()}
        else:
            self._where = {name: folder / SINGLE for name in safetensors_keys(folder / SINGLE)}
        self._folder = folder

    @property
    def names(self) -> Iterable[str]:
        """Of all tensors in the files."""
        return self._where.keys()

    def find(self, name: str) -> Optional[str]:
        """The name in the files of the model's tensor ``name``; None where there is none, or no single one."""
        if name in self._where:
            return name
        tail = "." + name.removeprefix("model.")  # wrappers (image models) put more in front of it
        found = [other for other in self._where if f".{other}".endswith(tail)]
        return found[0] if len(found) == 1 else None

    def _of_an_end(self, name: str) -> Optional[str]:
        """Where files nest the decoder in another way than the model, or call its ends by the names of the release."""
        module, tensor = name.rsplit(".", 1)[0].rsplit(".", 1)[-1], name.rsplit(".", 1)[-1]
        for short in (module, *_RELEASED.get(module, ())):
            found = [other for other in self._where if f".{other}".endswith(f".{short}.{tensor}")
                     and not set(other.split(".")) & _NOT_ENDS]
            if len(found) == 1:
                return found[0]
        return None

    def is_float(self, name: str) -> bool:
        """Whether a tensor is stored as plain 16 or 32 bit floating point numbers."""
        with safe_open(self._where[name], framework="pt") as handle:
            return handle.get_slice(name).get_dtype() in ("F32", "F16", "BF16")

    def read(self, name: str) -> Tensor:
        """A tensor of the model. Raises InputRefused, naming the folder, where the files lack it."""
        found = self.find(name) or self._of_an_end(name)
        if found is None:
            raise InputRefused(f"{self._folder} has no tensor {name!r}, so the target's embedding, LM head or final "
                               "norm cannot be read. Use features.mode=cached or online, which load the whole target.")
        with safe_open(self._where[found], framework="pt") as handle:
            return handle.get_tensor(found)


def stored_names(model: Any, files: TensorFiles) -> Optional[dict[str, str]]:
    """Name in the files of every tensor of ``model``; None where the files do not hold them as they are in memory.

    That is so for quantised models, and where experts are joined on loading.
    """
    names = {name: files.find(name) for name in model.state_dict()}
    if model.config.get_text_config().tie_word_embeddings:
        ends = {model.get_output_embeddings(): "", model.get_input_embeddings(): ""}
        for name, module in model.named_modules():
            if module in ends:
                ends[module] = f"{name}.weight"
        output, embedding = ends.values()
        names[output] = files.find(embedding)
    found = {name: file for name, file in names.items() if file is not None}
    return found if len(found) == len(names) and all(map(files.is_float, found.values())) else None


def fingerprint_of_files(model: Any, files: TensorFiles) -> str:
    """SHA-256 over the configuration and every tensor (name, shape, dtype, bytes); ``model`` may be without weights.

    Where the files hold the model's tensors as they are in memory, it is the hash of those, in the model's dtype;
    otherwise it is the hash of the tensors in the files.
    """
    names = stored_names(model, files)
    total = hashlib.sha256(hash_config(model.config))
    if names is None:
        log.info("fingerprint of the files: their tensors are not those of the loaded model")
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}

    def digest(name: str) -> bytes:
        if names is None:
            return hash_tensor(name, files.read(name))
        return hash_tensor(name, files.read(names[name]).to(dtypes[name]))

    with ThreadPoolExecutor(4) as pool:  # hashlib releases the interpreter lock; four tensors are in memory
        for part in pool.map(digest, sorted(files.names if names is None else names)):
            total.update(part)
    return total.hexdigest()
