"""Drafters of other kinds in real vLLM on the CPU: trained Medusa heads, and an EAGLE-3 drafter that proposes a part of
the vocabulary only. Greedy output is the target's, acceptance is our decoder's.

Needs DEEPSPEC_VLLM_PYTHON.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_export import LAYERS, VOCABULARY, export_model, make_config, save_target
from test_vllm import PYTHON, serve, speculative_config

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.drafters.registry import build_drafter, shape_from
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.drafters.vocabulary import choose_ids
from deepspec.export.gates import block_logits
from deepspec.export.load import load_exported
from deepspec.targets.load import load_target
from deepspec.targets.sampling import Sampling
from tests.trained_drafter import greedy_texts, prompt_ids

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
TOKENS, STEPS = 32, 120
PROMPTS = prompt_ids(8, 900, seed=4)
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"algorithm": "medusa", "num_layers": 1, "head": "none", "confidence_head": False, "block_size": 4},
    "eagle3-reduced": {"algorithm": "eagle3", "head": "none", "confidence_head": False, "block_size": 4},
}


def trained(target: Any, shape: DrafterShape, texts: list[torch.Tensor]) -> Any:
    """A drafter that has learnt the target's greedy ``texts``, as far as it may say their tokens."""
    torch.manual_seed(1)
    drafter = build_drafter(shape, SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=4e-3)
    features = [target.encode(text, [len(text)]).features for text in texts]
    steps = torch.arange(shape.draft_length)
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[list(shape.draft_ids or range(shape.vocab_size))] = True
    for step in range(STEPS):
        text, feature = texts[step % len(texts)], features[step % len(texts)]
        anchors = torch.arange(1 + step % 2, len(text) - shape.draft_length - 1, 2)
        logits = block_logits.__wrapped__(drafter, feature, text, anchors).flatten(0, 1)
        labels = text[anchors[:, None] + 1 + steps].flatten()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits[known[labels]], labels[known[labels]]).backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_and_acceptance(tmp_path: Path, kind: str) -> None:
    folder = save_target(tmp_path / "target", sharp=6.0)
    config = make_config(folder, tmp_path / "run", **KINDS[kind])
    if kind == "medusa":
        config.target.feature_layers = [LAYERS - 1]
    target = load_target(config.target, device="cpu", cache_dir=tmp_path / "data")
    shape = shape_from(target.spec, config.target, config.drafter)
    texts = greedy_texts(target, PROMPTS, 72)
    if kind == "eagle3-reduced":
        counts = torch.bincount(torch.cat(texts), minlength=VOCABULARY)
        shape = replace(shape, draft_ids=choose_ids(counts, int((counts > 0).sum()) // 2))
    export = export_model(config, target, trained(target, shape, texts))
    drafter, _ = load_exported(export)
    decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=0.0), batch_size=len(PROMPTS),
                                 max_new_tokens=TOKENS, ignore_eos=True)
    requests: list[Any] = [DecodeRequest(str(number), tuple(prompt)) for number, prompt in enumerate(PROMPTS)]
    rounds = [item for result in decoder.decode(requests) for item in result.rounds]
    mine = 1 + sum(item.accepted for item in rounds) / len(rounds)
    report = serve({"target": str(folder), "speculative_config": speculative_config(export), "prompts": PROMPTS,
                    "max_tokens": TOKENS, "alone": True}, timeout=1200)
    print(f"acceptance length: vLLM {report['acceptance_length']:.4f} ({report['rounds']} rounds), ours {mine:.4f}")
    assert report["greedy_equal"] and mine > 1.2
    assert abs(report["acceptance_length"] - mine) <= 0.02
