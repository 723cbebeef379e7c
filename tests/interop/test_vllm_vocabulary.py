"""A DSpark drafter with a reduced draft vocabulary in real vLLM on the CPU: every draft is ours, token for token.

Needs DEEPSPEC_VLLM_PYTHON.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_drafts_are_ours
from random_export import VOCABULARY, make_config, save_target
from test_vllm import PROMPTS, PYTHON, serve

from deepspec.drafters.config import IDS_KEY, shape_to_config
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import SharedWeights
from deepspec.export import tensors
from deepspec.targets.load import load_target

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")


def test_every_draft_of_a_reduced_vocabulary_is_ours(tmp_path: Path) -> None:
    folder, export = save_target(tmp_path / "target"), tmp_path / "export"
    config = make_config(folder, tmp_path / "run")
    target: Any = load_target(config.target, device="cpu", cache_dir=tmp_path / "data")
    shape = shape_from(target.spec, config.target, config.drafter)
    shape = replace(shape, draft_ids=tuple(range(3, VOCABULARY, 3)))
    torch.manual_seed(1)
    drafter = build_drafter(shape, SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint))
    drafter.requires_grad_(False)
    for parameter in drafter.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    export.mkdir()
    values = shape_to_config(shape, num_anchors=4, dtype="float32")
    values.pop(IDS_KEY, None)
    (export / "config.json").write_text(json.dumps(values))
    tensors.write(export, tensors.collect(drafter, shape, drafter.shared, torch.float32))
    report = serve({"target": str(folder), "prompts": PROMPTS[:1], "max_tokens": 24, "record": True,
                    "speculative_config": {"method": "dspark", "model": str(export), "num_speculative_tokens": 4,
                                           "draft_sample_method": "greedy"}})
    assert_drafts_are_ours(folder, export, PROMPTS[0], report)
