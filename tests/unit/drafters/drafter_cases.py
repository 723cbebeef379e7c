"""Small drafters and packs for the tests of drafters and objective."""

from dataclasses import replace
from typing import Any, Sequence

import torch
from torch import Tensor

from deepspec.config.schema import ObjectiveConfig
from deepspec.data.batch import AnchorBlocks, TrainingBatch
from deepspec.drafters.dspark import DSparkDrafter
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.objective import drafter_loss, window_weights

SHAPE = DrafterShape(
    algorithm="dspark", hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    vocab_size=61, rms_norm_eps=1e-6, rope_theta=10000.0, rope_parameters={"rope_type": "default"},
    max_position_embeddings=256, block_size=4, sample_from_anchor=True, head="vanilla", markov_rank=6,
    confidence_head=True, confidence_with_markov=True, mask_token_id=60, feature_layers=(1, 3), num_target_layers=6,
    target_hidden_size=32, target_model_type="llama",
)


def shape(**changes: Any) -> DrafterShape:
    """SHAPE with changes; without a head also without what needs one."""
    if changes.get("head") == "none":
        changes = {"markov_rank": 0, "confidence_with_markov": False, **changes}
    return replace(SHAPE, **changes)


def shared_weights(of: DrafterShape, dtype: torch.dtype = torch.float32, seed: int = 0) -> SharedWeights:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(of.vocab_size, of.hidden_size, generator=generator).to(dtype)
    lm_head = (torch.randn(of.vocab_size, of.hidden_size, generator=generator) * 0.3).to(dtype)
    return SharedWeights(embed, lm_head, "test")


def drafter(of: DrafterShape = SHAPE, dtype: torch.dtype = torch.float32, **options: Any) -> DSparkDrafter:
    """A drafter with weights large enough that every part of it matters."""
    torch.manual_seed(0)
    model = build_drafter(of, shared_weights(of, dtype), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0).add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def pack(
    of: DrafterShape, documents: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0, supervised: int = 0,
    dtype: torch.dtype = torch.float32,
) -> TrainingBatch:
    """Documents (length, anchors) on one axis. ``supervised`` tokens are supervised at most, counted from each start.

    A document's content depends on its length and the seed alone, so that packed and separate batches can be compared.
    """
    length = of.draft_length
    ids, features, last, positions, starts = [], [], [], [], [0]
    fields: dict[str, list[Tensor]] = {name: [] for name in AnchorBlocks.__dataclass_fields__}
    for size, anchors in documents:
        generator = torch.Generator().manual_seed(1000 * seed + size)
        tokens = torch.randint(0, of.vocab_size - 1, (size,), generator=generator)
        width = len(of.feature_layers) * of.target_hidden_size
        features.append(torch.randn(size, width, generator=generator, dtype=torch.float64))
        last.append(torch.randn(size, of.target_hidden_size, generator=generator, dtype=torch.float64))
        for anchor in anchors:
            label_at = anchor + 1 + torch.arange(length)
            mask = label_at < min(size, supervised or size)
            labels = torch.where(mask, tokens[label_at.clamp(max=size - 1)], 0)
            fields["anchor_rows"].append(torch.tensor(starts[-1] + anchor))
            fields["context_starts"].append(torch.tensor(starts[-1]))
            fields["anchor_positions"].append(torch.tensor(anchor))
            fields["anchor_ids"].append(tokens[anchor])
            fields["label_ids"].append(labels)
            fields["previous_ids"].append(torch.cat((tokens[anchor][None], labels[:-1])))
            fields["target_rows"].append(starts[-1] + torch.where(mask, label_at - 1, anchor))
            fields["mask"].append(mask)
        ids.append(tokens)
        positions.append(torch.arange(size))
        starts.append(starts[-1] + size)
    flat, wide = torch.empty(0, dtype=torch.int64), torch.empty(0, length, dtype=torch.int64)
    empty = {name: flat if name.startswith(("anchor", "context")) else wide for name in fields}
    empty["mask"] = wide.bool()
    blocks = AnchorBlocks(**{name: torch.stack(rows) if rows else empty[name] for name, rows in fields.items()})
    return TrainingBatch(
        sample_ids=tuple(str(size) for size, _ in documents), input_ids=torch.cat(ids), positions=torch.cat(positions),
        document_starts=tuple(starts), features=torch.cat(features).to(dtype), last_hidden=torch.cat(last).to(dtype),
        blocks=blocks,
    )


DOCUMENTS = ((17, (0, 3, 4, 9, 15)), (1, ()), (9, (2, 7)), (23, (0, 21, 1)))


def loss_and_grads(model: DSparkDrafter, batch: TrainingBatch, window: TrainingBatch) -> tuple[Tensor, list[Tensor]]:
    objective = ObjectiveConfig()
    denominators = window_weights(window.blocks, objective, model.shape.draft_length)
    loss = drafter_loss(model(batch), batch, model.shared, objective, denominators, model.shape).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))
