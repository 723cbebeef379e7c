"""Cross-entropy against the target's distribution: the chunked pass has the values and gradients of the reference."""

from typing import Any

import pytest
import torch
from drafter_cases import DOCUMENTS, drafter, pack, shape

from deepspec.config.schema import ObjectiveConfig
from deepspec.errors import ConfigError
from deepspec.objective import drafter_loss, window_weights


@pytest.mark.parametrize("changes", [
    {}, {"head": "none"}, {"head": "gated"}, {"final_logit_softcap": 5.0}], ids=str)
def test_chunks_equal_the_reference(changes: dict[str, Any]) -> None:
    of = shape(confidence_head=False, **changes)
    model = drafter(of, torch.float64)
    batch = pack(of, DOCUMENTS, dtype=torch.float64, supervised=15)
    found = []
    for implementation in ("eager", "chunked"):
        objective = ObjectiveConfig(implementation=implementation, ce_labels="target", ce_weight=0.7, tv_weight=0.3)
        denominators = window_weights(batch.blocks, objective, of.draft_length)
        terms = drafter_loss(model(batch), batch, model.shared, objective, denominators, of)
        found.append((terms, torch.autograd.grad(terms.loss, list(model.parameters()))))
    (one, grads), (two, others) = found
    torch.testing.assert_close(two.loss, one.loss)
    for name, value in one.sums.items():
        torch.testing.assert_close(two.sums[name], value, msg=name)
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(other, grad, rtol=1e-9, atol=1e-12)


def test_the_value_is_the_cross_entropy_of_two_distributions() -> None:
    """Never below the target's entropy, and equal to it for a drafter that is the target."""
    of = shape(confidence_head=False, head="none")
    model, batch = drafter(of, torch.float64), pack(of, ((9, (2, 5)),), dtype=torch.float64)
    objective = ObjectiveConfig(ce_labels="target", ce_weight=1.0, tv_weight=0.0, decay=1e9)
    logits = batch.last_hidden[batch.blocks.target_rows] @ model.shared.lm_head.double().T
    probs = torch.softmax(logits, dim=-1)
    entropy = -(probs * probs.log()).sum(-1)[batch.blocks.mask].sum()
    denominators = window_weights(batch.blocks, objective, of.draft_length)
    output = model(batch)
    terms = drafter_loss(output, batch, model.shared, objective, denominators, of)
    assert terms.sums["loss_ce"] > entropy
    output.hidden.data.copy_(batch.last_hidden[batch.blocks.target_rows])
    perfect = drafter_loss(output, batch, model.shared, objective, denominators, of)
    torch.testing.assert_close(perfect.sums["loss_ce"], entropy, rtol=1e-6, atol=0.0)


def test_the_fused_kernel_refuses_it() -> None:
    of = shape(confidence_head=False)
    model, batch = drafter(of), pack(of, DOCUMENTS)
    objective = ObjectiveConfig(implementation="triton", ce_labels="target")
    with pytest.raises(ConfigError, match="no kernel for objective.ce_labels=target"):
        drafter_loss(model(batch), batch, model.shared, objective,
                     window_weights(batch.blocks, objective, of.draft_length), of)
