"""Exports of drafters with a reduced vocabulary: d2t, t2d and fewer rows, in every layout that engines take."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from deepspec.drafters.registry import build_drafter
from deepspec.errors import InputRefused
from deepspec.export import tensors
from deepspec.export.exporter import export_drafter
from deepspec.training.importing import check_shared, own_tensors, read_drafter

IDS = tuple(range(3, 320, 5))
EAGLE3 = {"algorithm": "eagle3", "head": "none", "confidence_head": False}


@pytest.mark.parametrize("options", [{}, EAGLE3, {"head": "none", "confidence_head": False, "algorithm": "dflash"}],
                         ids=["dspark", "eagle3", "dflash"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_check_passes_and_it_comes_back(make_request: Callable[..., Any], options: dict[str, Any],
                                              dtype: str) -> None:
    request = make_request(formats=("deepspec", "speculators"), dtype=dtype, **options)
    drafter = request.drafter
    reduced = build_drafter(replace(drafter.shape, draft_ids=IDS), drafter.shared).eval().requires_grad_(False)
    reduced.load_state_dict(drafter.state_dict())
    folder = export_drafter(replace(request, drafter=reduced))
    values = json.loads((folder / "config.json").read_text())
    assert values["draft_vocab_size"] == len(IDS) and "deepspec_draft_ids" not in values
    for where in (folder, folder / "speculators"):
        stored = tensors.read(where)
        assert stored["lm_head.weight"].shape == (len(IDS), 64) and stored["d2t"].dtype == torch.int64
        assert (stored["d2t"] + torch.arange(len(IDS))).tolist() == list(IDS)
        config = json.loads((where / "config.json").read_text())
        assert config["draft_vocab_size"] == len(IDS)
        shape, found = read_drafter(where, 6)
        assert shape.draft_ids == IDS
        own = own_tensors(found)
        for name, value in reduced.named_parameters():
            rows = list(IDS) if name.endswith("markov_w2.weight") else slice(None)
            assert torch.equal(own[name][rows], value[rows].to(own[name].dtype)), name
        if dtype == "float32":
            check_shared(found, reduced.shared, Path(where), shape.draft_ids)
            with pytest.raises(InputRefused, match="lm_head.weight is not this target's"):
                check_shared(found, reduced.shared, Path(where), tuple(token + 1 for token in IDS[:-1]) + (0,))
