"""A trained MTP drafter in real vLLM on the CPU, as ``serving/launch.md`` says it is served: the target with two keys
more in its configuration. Greedy output is the target's, acceptance is our decoder's, at one and at four draft tokens,
and at temperature 1.

Needs DEEPSPEC_VLLM_PYTHON.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import accepted, decoded, length, standard_errors
from random_export import LAYERS, export_model, make_config, save_target
from test_vllm import PYTHON, serve, speculative_config

from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.export.gates import block_logits
from deepspec.targets.load import load_target
from tests.trained_drafter import greedy_texts, prompt_ids

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
TOKENS, SAMPLED, STEPS, SEEDS = 32, 48, 120, 6
PROMPTS = prompt_ids(8, 900, seed=4)


def trained(target: Any, shape: DrafterShape) -> Any:
    """A drafter that has learnt the target's greedy answers to ``PROMPTS``."""
    torch.manual_seed(1)
    drafter = build_drafter(shape, SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=4e-3)
    texts = greedy_texts(target, PROMPTS, 72)
    features = [target.encode(text, [len(text)]).features for text in texts]
    steps = torch.arange(shape.draft_length)
    for step in range(STEPS):
        text, known = texts[step % len(texts)], features[step % len(texts)]
        anchors = torch.arange(1 + step % 2, len(text) - shape.draft_length - 1, 2)
        logits = block_logits.__wrapped__(drafter, known, text, anchors)  # the original runs without gradients
        labels = text[anchors[:, None] + 1 + steps]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("block_size", [1, 4])
def test_greedy_output_and_acceptance(tmp_path: Path, block_size: int) -> None:
    folder = save_target(tmp_path / "target", sharp=6.0)
    config = make_config(folder, tmp_path / "run", algorithm="mtp", head="none", confidence_head=False,
                         block_size=block_size)
    config.target.feature_layers = [LAYERS - 1]
    target = load_target(config.target, device="cpu", cache_dir=tmp_path / "data")
    shape = shape_from(target.spec, config.target, config.drafter)
    export = export_model(config, target, trained(target, shape))
    mine = length(accepted(decoded(target, export, PROMPTS, tokens=TOKENS)))
    said = (export / "serving" / "launch.md").read_text().split("--hf-overrides '")[1].split("'")[0]
    job = {"target": str(folder), "prompts": PROMPTS, "max_tokens": TOKENS, "hf_overrides": json.loads(said)}
    report = serve(job | {"speculative_config": speculative_config(export), "alone": True})
    print(f"acceptance length: vLLM {report['acceptance_length']:.4f} ({report['rounds']} rounds), ours {mine:.4f}")
    assert report["greedy_equal"] and mine > 1.4
    assert abs(report["acceptance_length"] - mine) <= 0.02
    if block_size > 1:
        return
    report = serve(job | {"speculative_config": speculative_config(export), "temperature": 1.0, "max_tokens": SAMPLED})
    rounds = [item for seed in range(SEEDS) for item in accepted(decoded(
        target, export, PROMPTS, tokens=SAMPLED, temperature=1.0, seed=seed))]
    gap, error = standard_errors(report, rounds)
    print(f"temperature 1: vLLM {report['acceptance_length']:.4f} ({report['rounds']} rounds), ours "
          f"{length(rounds):.4f} ({len(rounds)} rounds), s.e. {error:.4f}, {gap:+.2f} standard errors")
    assert abs(gap) <= 3
