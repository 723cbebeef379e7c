"""Gates that run models: reload parity (8), the layer-id gate (9), and acceptance under shifted layers and slots (10).

T tokens, R anchors, K draft tokens, M feature layers, D width, V vocabulary.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Sequence, cast

import torch
from torch import Tensor

from deepspec.data.anchors import build_blocks
from deepspec.data.batch import AnchorBlocks, Sample, TrainingBatch
from deepspec.drafters.base import Drafter
from deepspec.drafters.sequential import BlockDrafter
from deepspec.export.load import load_exported

SHIFTS = (-1, 0, 1)
CLEAR = 2.0  # standard errors of the paired difference
MATERIAL = 0.02  # mean acceptance a wrong convention loses at least; a short training leaves less between neighbours


def fixed_tokens(vocabulary: int, length: int = 48) -> Tensor:
    """Token ids [T] that are the same in every export."""
    return torch.arange(length, dtype=torch.int64) * 7919 % vocabulary


@torch.no_grad()
def hidden_states(target: Any, input_ids: Tensor) -> list[Tensor]:
    """All hidden states [T, D] of one document through Hugging Face's ``output_hidden_states`` and eager attention:
    nothing of the packed path or its hooks takes part. Entry 0 is the embedding, entry i + 1 the output of layer i.
    """
    model, packed = target._model, target._model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model(input_ids[None].to(target.device), use_cache=False, output_hidden_states=True)
    finally:
        model.set_attn_implementation(packed)
    return [state[0] for state in output.hidden_states]


@torch.no_grad()
def layer_outputs(target: Any, input_ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """``hidden_states`` as a drafter takes them for features, and the last hidden state [T, D] after the final norm.

    Of a target with residual streams an output is their mean, and the last entry that of the complete last layer, for
    which Hugging Face lists the normed state instead.
    """
    captured: list[Tensor] = []
    hook = target.layers[-1].register_forward_hook(
        lambda module, arguments, output: captured.append(output[0] if isinstance(output, tuple) else output))
    try:
        states = hidden_states(target, input_ids)
    finally:
        hook.remove()
    last = states[-1]
    if captured[0].dim() == 4:
        states = [state.mean(dim=1) for state in (*states[:-1], captured[0][0])]
    return states, last


class _ContextDrafter(BlockDrafter, Protocol):
    """A drafter whose blocks read the context's keys and values."""

    def project_context(self, features: Tensor) -> Tensor:
        """Context of features."""

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Its keys and values."""

    def block_hidden(self, anchor_ids: Tensor, anchor_positions: Tensor, keys: Tensor, values: Tensor,
                     context_lengths: Tensor) -> Tensor:
        """h_k of blocks."""


@torch.no_grad()
def block_logits(drafter: Drafter, features: Tensor, input_ids: Tensor, anchors: Tensor) -> Tensor:
    """Teacher-forced draft logits [R, K, V] (base + bias) at ``anchors`` [R] of one document with features [T, M*D]."""
    if drafter.shape.autoregressive:
        return _chain_logits(drafter, features, input_ids, anchors)
    device = drafter.shared.embed.device
    features, input_ids, anchors = features.to(device), input_ids.to(device), anchors.to(device)
    positions = torch.arange(len(input_ids), device=device)
    blocks = cast(_ContextDrafter, drafter)
    keys, values = blocks.context_kv(blocks.project_context(features), positions)
    count = len(anchors)
    hidden = blocks.block_hidden(
        input_ids[anchors], anchors, keys[:, None].expand(-1, count, -1, -1, -1),
        values[:, None].expand(-1, count, -1, -1, -1), anchors,
    )
    logits = drafter.base_logits(hidden)
    if blocks.sequential is not None:
        previous = input_ids[anchors[:, None] + torch.arange(hidden.shape[1], device=device)]
        transitions = blocks.sequential.transitions(previous, hidden)
        logits = logits + blocks.sequential.bias(transitions)
    return logits


def _chain_logits(drafter: Drafter, features: Tensor, input_ids: Tensor, anchors: Tensor) -> Tensor:
    """``block_logits`` of chains that are fed the document's tokens and their own hidden states."""
    ids, device = input_ids.cpu(), drafter.shared.embed.device
    sample = Sample("gate", "gate", ids, torch.ones(len(ids), dtype=torch.bool))
    blocks = build_blocks([sample], [anchors.cpu()], drafter.shape.draft_length)
    moved = AnchorBlocks(**{name: getattr(blocks, name).to(device) for name in AnchorBlocks.__dataclass_fields__})
    batch = TrainingBatch(
        sample_ids=("gate",), input_ids=ids.to(device), positions=torch.arange(len(ids), device=device),
        document_starts=(0, len(ids)), features=features.to(device), last_hidden=features.new_empty(0), blocks=moved,
    )
    return drafter.base_logits(drafter(batch).hidden)


@dataclass(frozen=True)
class ReloadParity:
    """Largest logit differences: of the reloaded drafter to the one exported (same dtype), and what rounding cost."""

    difference: float
    tolerance: float
    rounding: float


def _largest_gap(one: Tensor, other: Tensor) -> float:
    """Largest difference; tokens that neither proposes (minus infinity) do not differ."""
    return float(torch.where(one == other, 0.0, (one - other).abs()).max())


def reload_parity(folder: Path, drafter: Drafter, dtype: torch.dtype) -> ReloadParity:
    """Check 8 with our own loader: base + bias logits of the file equal the drafter's on fixed tokens and features.

    Compared in the export's dtype; ``rounding`` is the distance to the drafter in its own dtype.
    """
    loaded, _ = load_exported(folder)
    shape = drafter.shape
    ids = fixed_tokens(shape.vocab_size)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(len(ids), len(shape.feature_layers) * shape.target_hidden_size, generator=generator)
    anchors = torch.arange(1, len(ids) - shape.draft_length, 5)
    reference = _cast(drafter, dtype)
    expected = block_logits(reference, features, ids, anchors)
    found = block_logits(loaded, features, ids, anchors)
    original = block_logits(drafter, features, ids, anchors).cpu()
    confidence = _confidence_difference(reference, loaded)
    # Every product rounds to bf16 once, so an ulp of the largest logit is what another summation order may change.
    ulp = float(expected[expected.isfinite()].abs().max()) * 2.0**-8 if dtype == torch.bfloat16 else 0.0
    return ReloadParity(
        difference=max(confidence, _largest_gap(expected.cpu(), found.cpu())), tolerance=ulp,
        rounding=_largest_gap(original.float(), found.cpu().float()),
    )


@torch.no_grad()
def _confidence_difference(reference: Any, loaded: Any) -> float:
    """Largest difference of the two confidence heads' logits on fixed inputs; 0 where there is no head."""
    if getattr(reference, "confidence_head", None) is None:
        return 0.0
    weight = reference.confidence_head.proj.weight
    inputs = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    return float((reference.confidence_head(inputs, None) - loaded.confidence_head(inputs, None)).abs().max())


def _cast(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """A copy of ``drafter`` on the CPU in ``dtype``, its shared matrices included; the original is not touched."""
    from dataclasses import replace

    shared = replace(drafter.shared, embed=drafter.shared.embed.detach().to("cpu", dtype),
                     lm_head=drafter.shared.lm_head.detach().to("cpu", dtype))
    original, drafter.shared = drafter.shared, shared  # a copy of the original matrices would be thrown away
    try:
        clone = copy.deepcopy(drafter, {id(shared): shared})
    finally:
        drafter.shared = original
    clone = clone.to(device="cpu").cast(dtype).eval()
    clone.shared = shared
    return clone


def layer_id_gate(target: Any, ids: Sequence[int]) -> list[str]:
    """Check 9: features at the exported ids, captured independently, equal ``target.encode``; shifted ids must not."""
    tokens = fixed_tokens(min(target.spec.vocab_size, target.tokenizer_size))
    packed = target.encode(tokens.to(target.device), [len(tokens)]).features.float().cpu()
    states = [state.float().cpu() for state in layer_outputs(target, tokens)[0]]
    tolerance = 1e-4 if target.dtype == torch.float32 else 4e-2
    problems = []
    for shift in _possible_shifts(ids, len(states)):
        captured = torch.cat([states[i + 1 + shift] for i in ids], dim=-1)
        if captured.shape != packed.shape:
            return [f"{len(ids)} exported layer ids, but the target is encoded with {len(target.feature_layers)}"]
        difference = float((captured - packed).abs().max() / captured.abs().max())
        if shift == 0 and difference > tolerance:
            problems.append(f"features at target_layer_ids={list(ids)} differ from the target's hidden_states[i+1] by "
                            f"{difference:.2g} of their size (tolerance {tolerance:g})")
        if shift != 0 and difference <= 10 * tolerance:
            problems.append(f"layer ids shifted by {shift:+d} give the same features, so a wrong convention would show "
                            "nowhere")
    return problems


def _possible_shifts(ids: Sequence[int], states: int) -> tuple[int, ...]:
    """Shifts under which all ids still name one of the target's hidden states: beyond the last one there is none."""
    return tuple(shift for shift in SHIFTS if ids[0] + 1 + shift >= 0 and ids[-1] + 1 + shift < states)


@dataclass(frozen=True)
class ShiftResult:
    """Mean acceptance rate of the blocks under shifts of layer ids and of slots, and what that says."""

    layers: dict[int, float]
    slots: dict[int, float]
    blocks: int
    verdict: str  # clear | indistinct | wrong
    note: str


def _rates(drafter: Drafter, target: Any, tokens: Tensor, per_document: int) -> dict[tuple[str, int], Tensor]:
    """Acceptance per block [R] under each shift, on one document."""
    length, gamma = len(tokens), drafter.shape.draft_length
    last = length - gamma - 3
    anchors = torch.linspace(min(8, last), last, steps=min(per_document, max(1, last - 8))).long().unique()
    states, last_hidden = layer_outputs(target, tokens)
    ids = drafter.shape.feature_layers
    target_probs = target.logits(last_hidden).softmax(dim=-1)

    def rate(layer_shift: int, slot_shift: int) -> Tensor:
        features = torch.cat([states[i + 1 + layer_shift] for i in ids], dim=-1)
        draft = block_logits(drafter, features, tokens, anchors).softmax(dim=-1)
        rows = anchors[:, None] + torch.arange(gamma) + slot_shift
        wanted = target_probs[rows.to(target_probs.device)].to(draft.device)
        return (1.0 - 0.5 * (draft - wanted).abs().sum(dim=-1)).mean(dim=-1).cpu()

    found = {("layers", shift): rate(shift, 0) for shift in _possible_shifts(ids, len(states))}
    found |= {("slots", shift): found["layers", 0] if shift == 0 else rate(0, shift) for shift in SHIFTS}
    return found


@torch.no_grad()
def shift_gate(drafter: Drafter, target: Any, documents: Sequence[Tensor], per_document: int = 16) -> ShiftResult:
    """Check 10 at export: analytic acceptance at teacher-forced anchors, where a shift of 0 must win clearly.

    ``wrong`` when a shifted convention beats the exported one beyond noise and by ``MATERIAL``, ``indistinct`` when
    nothing stands out (an untrained drafter, or one that hardly uses its features).
    """
    collected: dict[tuple[str, int], list[Tensor]] = {}
    for tokens in documents:
        if len(tokens) < drafter.shape.draft_length + 12:
            continue
        for key, value in _rates(drafter, target, tokens, per_document).items():
            collected.setdefault(key, []).append(value)
    if not collected:
        return ShiftResult({}, {}, 0, "indistinct", "no held-out sample is long enough")
    rates = {key: torch.cat(values).double() for key, values in collected.items()}
    scores = {}
    for (kind, shift), value in rates.items():
        if shift:
            gain = rates[kind, 0] - value
            error = float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else float("inf")
            scores[kind, shift] = float(gain.mean()) / max(error, 1e-12)
    means: dict[str, dict[int, float]] = {"layers": {}, "slots": {}}
    for (kind, shift), value in rates.items():
        means[kind][shift] = float(value.mean())
    lost = {
        (kind, shift) for (kind, shift), score in scores.items()
        if score < -CLEAR and means[kind][shift] - means[kind][0] > MATERIAL
    }
    beaten = [f"{kind} {shift:+d}" for kind, shift in scores if (kind, shift) in lost]
    unclear = [f"{kind} {shift:+d}" for (kind, shift), score in scores.items()
               if score <= CLEAR and (kind, shift) not in lost]
    trained = all(score > CLEAR for (kind, _), score in scores.items() if kind == "slots")
    if beaten and trained:
        verdict, note = "wrong", f"the exported convention is beaten by {', '.join(beaten)}"
    elif beaten or unclear:
        verdict, note = "indistinct", f"not told apart from {', '.join(beaten + unclear)}: trained too little?"
    else:
        verdict, note = "clear", "no shift comes close"
    return ShiftResult(means["layers"], means["slots"], len(next(iter(rates.values()))), verdict, note)
