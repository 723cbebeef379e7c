"""A target's logit scale, soft cap, embedding scale and padding rows, in the loss, in drafting and in the export."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Optional

import pytest
import torch
from drafter_cases import pack

sys.path.append(str(Path(__file__).parents[1] / "targets"))

from tiny_targets import random_ids, tiny_target  # noqa: E402

from deepspec.config.schema import DrafterConfig, ObjectiveConfig, TargetConfig  # noqa: E402
from deepspec.data.batch import TrainingBatch  # noqa: E402
from deepspec.drafters.base import Drafter  # noqa: E402
from deepspec.drafters.config import shape_from_config, shape_to_config  # noqa: E402
from deepspec.drafters.registry import build_drafter, shape_from  # noqa: E402
from deepspec.drafters.types import DrafterShape  # noqa: E402
from deepspec.export.engines import verdicts  # noqa: E402
from deepspec.objective import drafter_loss, window_weights  # noqa: E402
from deepspec.targets.frozen import FrozenTarget  # noqa: E402
from deepspec.training.session import shared_weights  # noqa: E402

FAMILIES = ("qwen3", "granite", "gemma2", "gemma4_text", "deepseek_v4", "phi3")


def _parts(family: str) -> tuple[FrozenTarget, Drafter, TrainingBatch]:
    """A target, a drafter with heads, and a pack whose hidden states are the target's own."""
    target = tiny_target(family)
    options = TargetConfig(name=family, feature_layers=[0, 2], mask_token_id=4)
    shape = shape_from(target.spec, options, DrafterConfig(num_layers=1, block_size=3, markov_rank=8))
    torch.manual_seed(0)
    drafter = build_drafter(shape, shared_weights(target))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    text = random_ids(40)
    states = target.encode(text, [40])
    batch = pack(replace(shape, vocab_size=280), [(40, [3, 11, 20])])  # ids that have a token
    return target, drafter, replace(batch, features=states.features, last_hidden=states.last_hidden)


def _losses(drafter: Drafter, batch: TrainingBatch, implementation: str) -> dict[str, torch.Tensor]:
    objective = ObjectiveConfig(implementation=implementation)
    shape: DrafterShape = drafter.shape
    weights = window_weights(batch.blocks, objective, shape.draft_length)
    return drafter_loss(drafter(batch), batch, drafter.shared, objective, weights, shape).sums


@torch.no_grad()
def _expected_rate(target: FrozenTarget, drafter: Drafter, batch: TrainingBatch) -> torch.Tensor:
    """Acceptance by position as verification has it: the target's own logits against what drafting samples from."""
    output, known = drafter(batch), target.tokenizer_size
    logits = drafter.base_logits(output.hidden) + output.transition @ output.output_factor.T
    logits[..., known:] = float("-inf")
    theirs = target.logits(batch.last_hidden[batch.blocks.target_rows.flatten()]).view(logits.shape)
    rate = torch.minimum(logits.softmax(-1), theirs.softmax(-1)).sum(-1)
    return (rate * batch.blocks.mask).sum(dim=0).double()


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_of_the_distributions_that_verification_compares(family: str, implementation: str) -> None:
    target, drafter, batch = _parts(family)
    expected = _expected_rate(target, drafter, batch)
    torch.testing.assert_close(_losses(drafter, batch, implementation)["acceptance_rate"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family, lost", [("qwen3", "tokens"), ("granite", "logit_scale"), ("gemma2", "softcap")])
def test_each_convention_matters(family: str, lost: str) -> None:
    """What the test above would not see if the random target were too tame."""
    target, drafter, batch = _parts(family)
    expected = _expected_rate(target, drafter, batch)
    changes: dict[str, Optional[float]] = {"logit_scale": 1.0} if lost == "logit_scale" else {}
    if lost == "softcap":
        changes = {"final_logit_softcap": None}
    drafter.shape = replace(drafter.shape, **changes)  # type: ignore[arg-type]
    if lost == "tokens":
        drafter.shared = replace(drafter.shared, tokens=None)
    found = _losses(drafter, batch, "eager")["acceptance_rate"]
    assert float((found - expected).abs().max()) > 1e-2


def test_a_label_that_no_token_has_is_not_supervised() -> None:
    _, drafter, batch = _parts("qwen3")
    labels = batch.blocks.label_ids.clone()
    labels[1, 2] = drafter.shape.vocab_size - 1
    blocks = replace(batch.blocks, label_ids=labels)
    sums = _losses(drafter, replace(batch, blocks=blocks), "chunked")
    assert sums["acceptance_rate_count"].tolist() == [3, 3, 2] and torch.isfinite(sums["loss_ce"])


@pytest.mark.parametrize("family", ["granite", "gemma2", "gemma3_text"])
def test_scales_reach_the_drafter_its_configuration_and_the_engines(family: str) -> None:
    target, drafter, _ = _parts(family)
    ids = random_ids(7)
    entered: list[torch.Tensor] = []
    target.layers[0].register_forward_pre_hook(
        lambda _module, arguments, keywords: entered.append((arguments or (keywords["hidden_states"],))[0]),
        with_kwargs=True)
    target.encode(ids, [7])
    torch.testing.assert_close(drafter._embed(ids), entered[0][0], atol=1e-4, rtol=1e-5)
    config = shape_to_config(drafter.shape, num_anchors=4)
    assert shape_from_config(config) == drafter.shape
    refused = {verdict.engine: verdict.reasons for verdict in verdicts(config)}
    assert any("scales its embeddings" in reason for reason in refused["vllm"])
    assert any("scales its logits" in reason for reason in refused["sglang"]) == (family == "granite")
    assert not any("scales its logits" in reason for reason in refused["vllm"])
