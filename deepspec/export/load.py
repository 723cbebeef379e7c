"""Reads an exported folder back: what a test, a later run or a notebook uses."""

import json
from pathlib import Path
from typing import Any

import torch

from deepspec.artifacts import read_manifest
from deepspec.drafters.base import Drafter
from deepspec.drafters.config import shape_from_config
from deepspec.drafters.config_gemma4 import without_scalars
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import SharedWeights
from deepspec.drafters.v4.release import from_release
from deepspec.drafters.vocabulary import stored_ids, widened
from deepspec.errors import InputRefused
from deepspec.export import layout, tensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of ``folder``. Raises InputRefused when it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputRefused(f"{path} cannot be read ({error}). Give the folder of an exported drafter.") from None


def load_exported(folder: Path, device: str | torch.device = "cpu") -> tuple[Drafter, SharedWeights]:
    """The drafter of an exported folder (DeepSpec layout) in eval mode, in the dtype of the file, and the matrices it
    shares with its target. Strict: a tensor that is missing, unknown or misshapen raises InputRefused."""
    folder = Path(folder)
    values = read_config(folder)
    stored = tensors.read(folder)
    shape = shape_from_config(values, stored_ids(stored, folder))
    expected = layout.expected_tensors(values)
    problems = [f"{name} is missing" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"{name} is unknown" for name in sorted(stored.keys() - expected.keys())]
    problems += [f"{name} has shape {tuple(stored[name].shape)}, expected {expected[name]}" for name in sorted(expected)
                 if name in stored and tuple(stored[name].shape) != expected[name]]
    if problems:
        raise InputRefused(f"{folder} does not hold the tensors its config.json promises: {'; '.join(problems[:5])}.")
    stored = without_scalars(stored, folder)
    if shape.draft_ids is not None:
        stored = widened(stored, shape.draft_ids, shape.vocab_size)
    manifest = read_manifest(folder)
    fingerprint = manifest.inputs.get("target", "") if manifest is not None else ""
    embed, lm_head = (stored.pop(name).to(device) for name in layout.shared_names(values))
    shared = SharedWeights(embed=embed, lm_head=lm_head, fingerprint=fingerprint)
    if shape.v4 is not None:
        stored = from_release(stored, values, str(folder))
    drafter = build_drafter(shape, shared).to(device=device).cast(shared.embed.dtype)
    parameters = drafter.tensors()
    if parameters.keys() != stored.keys():
        raise InputRefused(f"{folder}: the drafter of this version has other parameters than the file: "
                           f"{sorted(parameters.keys() ^ stored.keys())[:5]}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
    return drafter.eval(), shared
