"""A drafter with one thing wrong, as an engine with that mistake would run it. The original is never touched."""

from dataclasses import replace
from typing import Any, Callable, Mapping, Optional

import torch
from torch import Tensor, nn

from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights


@torch.no_grad()
def rebuild(drafter: Any, shape: Optional[DrafterShape] = None, *, embed: Optional[Tensor] = None,
            lm_head: Optional[Tensor] = None, tensors: Optional[Mapping[str, Tensor]] = None) -> Any:
    """A copy of ``drafter`` under another shape, other shared matrices or other tensors by name."""
    shared = SharedWeights(drafter.shared.embed if embed is None else embed,
                           drafter.shared.lm_head if lm_head is None else lm_head, drafter.shared.fingerprint)
    parameters = drafter.tensors()
    first = next(iter(parameters.values()))
    with torch.random.fork_rng():
        copy = build_drafter(shape or drafter.shape, shared)
    copy = copy.to(first.device).cast(drafter.dtype).eval().requires_grad_(False)
    for name, parameter in copy.tensors().items():
        parameter.copy_((tensors or {}).get(name, parameters[name]))
    return copy


def with_length(shape: DrafterShape, length: int) -> DrafterShape:
    """``shape`` drafting ``length`` tokens: engines take the number from their command line."""
    return replace(shape, block_size=length if shape.sample_from_anchor else length + 1)


def other_slots(shape: DrafterShape) -> DrafterShape:
    """The same number of draft tokens under the other slot convention."""
    length = shape.draft_length
    return replace(shape, sample_from_anchor=not shape.sample_from_anchor,
                   block_size=length + 1 if shape.sample_from_anchor else length)


def moved_positions(drafter: Any, offset: int) -> Any:
    """Blocks whose RoPE positions are ``offset`` off, the context's being right."""
    copy = rebuild(drafter)
    hidden = copy.block_hidden
    copy.block_hidden = lambda ids, positions, *rest: hidden(ids, (positions + offset).clamp_min(0), *rest)
    return copy


def first_key_norm(drafter: Any) -> Any:
    """Context keys of all layers normalised with the first layer's weight, as vLLM's CPU kernel does."""
    copy = rebuild(drafter)
    exact: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = copy.context_kv
    norms = [layer.self_attn.k_norm for layer in copy.layers]

    def context_kv(context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        for layer in copy.layers:
            layer.self_attn.k_norm = norms[0]
        try:
            return exact(context, positions)
        finally:
            for layer, norm in zip(copy.layers, norms):
                layer.self_attn.k_norm = norm

    copy.context_kv = context_kv
    return copy


def shuffled(matrix: Tensor) -> Tensor:
    """The rows of ``matrix`` in another order: a matrix of the right kind that belongs to something else."""
    order = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0))
    return matrix[order.to(matrix.device)]


def without_sequential(drafter: Any) -> Any:
    """The sequential head's tensors as zeros: never loaded."""
    zeros = {name: torch.zeros_like(value) for name, value in drafter.named_parameters()
             if name.startswith("markov_head.")}
    return rebuild(drafter, tensors=zeros)


def head_of(drafter: Any) -> Optional[nn.Module]:
    """The sequential head of drafters that have one."""
    return getattr(drafter, "sequential", None)
