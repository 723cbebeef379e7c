"""A drafter that was trained elsewhere (or exported here) as weights of this project's: any of the four layouts."""

import json
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepspec.drafters.config import shape_from_config
from deepspec.drafters.config_gemma4 import without_scalars
from deepspec.drafters.layouts import SHARED_NAMES, deepspec_values, layout_of
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.drafters.v4.config import completed, is_v4_config
from deepspec.drafters.v4.names import SHARED
from deepspec.drafters.v4.release import from_release
from deepspec.drafters.vocabulary import D2T, T2D, stored_ids, widened
from deepspec.errors import InputRefused

_SHARED_NAMES = (*SHARED_NAMES, "model.embed_tokens.weight", *SHARED)
_HEAD = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def read_values(folder: Path) -> dict[str, Any]:
    """config.json of ``folder`` as it is. Raises InputRefused when it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputRefused(f"{path} cannot be read ({error}). Give the folder of a drafter, in the layout of DeepSpec, "
                           "speculators, SpecForge or z-lab's DFlash.") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``folder`` by their published names. Raises InputRefused when there is none or one is damaged."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise InputRefused(f"{folder} has no .safetensors file. Give the folder of a drafter with its weights; convert "
                           "other files to safetensors first.")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            found |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise InputRefused(f"{path} cannot be read ({error}). Copy it again.") from None
    return found


def _empty_head(tensors: dict[str, Tensor]) -> bool:
    """Whether the Markov head is the zero one that anchor-slot DFlash drafters carry for their engines."""
    return all(name in tensors and not bool(tensors[name].any()) for name in _HEAD) and tensors[_HEAD[0]].shape[1] == 1


def read_drafter(folder: Path, target_layers: Optional[int] = None) -> tuple[DrafterShape, dict[str, Tensor]]:
    """Shape and own tensors of the drafter in ``folder``, whatever its layout; copies of the target's matrices under
    their published names are among them where the file has some.

    ``target_layers``: depth of the target, for layouts that do not say. Raises InputRefused for what cannot be read.
    """
    values = read_values(folder)
    if is_v4_config(values):
        return _read_stages(Path(folder), values)
    where = f"{folder} ({layout_of(values)} layout)"
    tensors = without_scalars(read_tensors(folder), Path(folder))
    ids = stored_ids(tensors, where)
    try:
        values = deepspec_values(values, target_layers=target_layers)
        if values.get("markov_rank") == 1 and not values.get("enable_confidence_head") and _empty_head(tensors):
            values = {key: value for key, value in values.items() if key not in ("dflash_config", "markov_head_type")}
            values |= {"markov_rank": 0, "deepspec_algorithm": "dflash"}
            tensors = {name: value for name, value in tensors.items() if name not in _HEAD}
        shape = shape_from_config(values, ids)
        if shape.draft_ids is not None:
            lm_head = tensors.pop("lm_head.weight", None)
            tensors = widened(tensors, shape.draft_ids, shape.vocab_size)
            tensors |= {} if lm_head is None else {"lm_head.weight": lm_head}
    except InputRefused as error:
        raise InputRefused(f"{where}: {error}") from None
    return shape, {name: value for name, value in tensors.items() if name not in (D2T, T2D)}


def _read_stages(folder: Path, values: dict[str, Any]) -> tuple[DrafterShape, dict[str, Tensor]]:
    """The DeepSeek-V4 style drafter of an export, or of a release that holds it beside its target's tensors."""
    shape = shape_from_config(values)
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys()
                          if name.startswith("mtp.") or name in SHARED}
        except (OSError, SafetensorError) as error:
            raise InputRefused(f"{path} cannot be read ({error}). Copy it again.") from None
    shared = {name: found[name] for name in SHARED if name in found}
    return shape, shared | from_release(found, completed(values), str(folder))


def own_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the copies of the target's two matrices."""
    return {name: value for name, value in tensors.items() if name not in _SHARED_NAMES}


def check_shared(tensors: dict[str, Tensor], shared: SharedWeights, where: Path,
                 draft_ids: Optional[tuple[int, ...]] = None) -> None:
    """Refuse copies of embedding or LM head that are not this target's: the drafter belongs to another one.

    Of the LM head, the rows of ``draft_ids`` where the draft vocabulary is reduced.
    """
    rows = shared.lm_head if draft_ids is None else shared.lm_head[list(draft_ids)]
    for names, matrix in ((("embed_tokens.weight", "model.embed_tokens.weight", SHARED[0]), shared.embed),
                          (("lm_head.weight", SHARED[1]), rows)):
        for name in names:
            stored = tensors.get(name)
            if stored is None:
                continue
            same = stored.shape == matrix.shape and torch.equal(stored, matrix.detach().to("cpu", stored.dtype))
            if not same:
                raise InputRefused(f"{where}: its {name} is not this target's. The drafter was trained for another "
                                   "model (or another revision of it): give that one as the target.")
