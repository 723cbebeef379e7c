"""The catalogue of mistakes: what each does to a drafter, what it is called, and what to do about it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Iterator, Optional, Sequence

from deepspec.doctor.reference import EMBEDDING
from deepspec.doctor.replay import Variant
from deepspec.doctor.variants import (
    first_key_norm, head_of, moved_positions, other_slots, rebuild, shuffled, without_sequential,
)
from deepspec.drafters.types import DrafterShape

AS_TRAINED = "as_trained"
_BLOCK_DRAFTERS = ("dspark", "dflash")


@dataclass(frozen=True)
class Hypothesis:
    """One way in which the engine may run the drafter. Those of one ``cause`` share its prior."""

    cause: str
    detail: str
    fix: str
    build: Callable[[], Variant]
    exact: bool = True  # False: stands for a kind of mistake, whose drafts are not known


@dataclass(frozen=True)
class Bench:
    """What hypotheses are made of. ``drafter`` drafts as many tokens as the engine does; ``served``: the drafter as
    the served folder's files describe it, where they differ from the run's."""

    drafter: Any
    special_ids: Sequence[int] = ()  # tokens an engine may put into empty slots instead of the mask
    last_layer: int = 0
    served: Optional[Any] = None
    served_differences: str = ""

    def variant(self, drafter: Optional[Any] = None, shift: int = 0, *, prompt_context: bool = True) -> Variant:
        """``drafter`` (None: the trained one) on features ``shift`` layers off."""
        used = self.drafter if drafter is None else drafter
        return Variant(used, tuple(layer + shift for layer in used.shape.feature_layers), prompt_context)

    def reshaped(self, shape: DrafterShape) -> Variant:
        """The trained drafter under another shape."""
        return self.variant(rebuild(self.drafter, shape))

    def moved(self, offset: int) -> Variant:
        """The trained drafter with blocks ``offset`` positions off."""
        return self.variant(moved_positions(self.drafter, offset))


def _layers(bench: Bench) -> Iterator[Hypothesis]:
    layers = bench.drafter.shape.feature_layers
    for shift in (-1, 1):
        if layers[0] + shift < EMBEDDING or layers[-1] + shift > bench.last_layer:
            continue
        wrong = [layer + shift for layer in layers]
        yield Hypothesis(
            "layers", f"the engine feeds the drafter outputs of layers {wrong} instead of {list(layers)}",
            "Layer ids count outputs of decoder layers from 0 in target_layer_ids and dflash_config; the same layers "
            f"are {[layer + 1 for layer in layers]} in aux_hidden_state_layer_ids and "
            "eagle_aux_hidden_state_layer_ids. Serve the folder as the export wrote it, or correct the ids.",
            partial(bench.variant, shift=shift))


def _slots(bench: Bench) -> Iterator[Hypothesis]:
    shape = bench.drafter.shape
    if shape.algorithm not in _BLOCK_DRAFTERS:
        return
    anchor, next_one = "the anchor's slot", "the slot after the anchor"
    trained, now = (anchor, next_one) if shape.sample_from_anchor else (next_one, anchor)
    yield Hypothesis(
        "slots", f"the engine takes the first draft token from {now}, the drafter was trained to give it in {trained}",
        f"Write sample_from_anchor={str(shape.sample_from_anchor).lower()} at the top level of config.json (formats "
        "default to different values), and serve an anchor-slot drafter with method dspark, never dflash.",
        lambda: bench.variant(rebuild(bench.drafter, other_slots(shape))))


def _mask(bench: Bench) -> Iterator[Hypothesis]:
    shape = bench.drafter.shape
    if shape.algorithm not in _BLOCK_DRAFTERS:
        return
    near = (shape.mask_token_id - 1, shape.mask_token_id + 1, 0, 1, shape.vocab_size - 1, *bench.special_ids)
    for other in dict.fromkeys(near):
        if other != shape.mask_token_id and 0 <= other < shape.vocab_size:
            yield Hypothesis(
                "mask_token", f"empty slots hold token {other} instead of the mask token {shape.mask_token_id}",
                f"Write mask_token_id={shape.mask_token_id} at the top level of config.json and in dflash_config.",
                partial(bench.reshaped, replace(shape, mask_token_id=other)))


def _rope(bench: Bench) -> Iterator[Hypothesis]:
    shape = bench.drafter.shape
    fix = (f"Write rope_theta={shape.rope_theta:g} and rope_parameters as the export has them: an engine without them "
           "takes a default or the target's.")
    for theta in (10000.0, 1000000.0, 500000.0):
        if theta != shape.rope_theta:
            other = replace(shape, rope_theta=theta, rope_parameters={**shape.rope_parameters, "rope_theta": theta})
            yield Hypothesis("rope", f"RoPE with base {theta:g} instead of {shape.rope_theta:g}", fix,
                             partial(bench.reshaped, other))
    if shape.algorithm in _BLOCK_DRAFTERS:
        for offset in (-1, 1):
            yield Hypothesis("positions", f"positions of the block are {offset:+d} off against its context",
                             "The engine counts positions of the draft block differently: report it with doctor.json, "
                             "or use another version.", partial(bench.moved, offset))


def _matrices(bench: Bench) -> Iterator[Hypothesis]:
    shared = bench.drafter.shared
    fix = ("Serve the folder as exported, with its own embed_tokens and lm_head, or see which matrices the engine "
           "shares with the drafter: they must be this target's.")
    if shared.embed.data_ptr() != shared.lm_head.data_ptr() and not bool((shared.embed == shared.lm_head).all()):
        yield Hypothesis("lm_head", "the drafter's LM head is the embedding (tied by mistake)", fix,
                         lambda: bench.variant(rebuild(bench.drafter, lm_head=shared.embed)))
        yield Hypothesis("embedding", "the drafter's embedding is the LM head", fix,
                         lambda: bench.variant(rebuild(bench.drafter, embed=shared.lm_head)))
    yield Hypothesis("lm_head", "the drafter's LM head is not the target's", fix,
                     lambda: bench.variant(rebuild(bench.drafter, lm_head=shuffled(shared.lm_head))), exact=False)
    yield Hypothesis("embedding", "the drafter's embedding is not the target's", fix,
                     lambda: bench.variant(rebuild(bench.drafter, embed=shuffled(shared.embed))), exact=False)
    if head_of(bench.drafter) is not None and hasattr(bench.drafter, "markov_head"):
        yield Hypothesis("sequential_head", "the sequential head's tensors were not loaded",
                         "Serve a folder whose markov_head.* tensors are there, with markov_rank and markov_head_type "
                         "at the top level of config.json; engines other than SGLang know the vanilla head only.",
                         lambda: bench.variant(without_sequential(bench.drafter)))


def _engine(bench: Bench) -> Iterator[Hypothesis]:
    yield Hypothesis("prefix_cache", "the drafter sees nothing of the prompt (as after a hit in a prefix cache)",
                     "Start the server without prefix caching (--no-enable-prefix-caching) and compare.",
                     lambda: bench.variant(prompt_context=False))
    if bench.drafter.shape.algorithm in _BLOCK_DRAFTERS and bench.drafter.shape.num_layers > 1:
        yield Hypothesis("key_norm", "context keys of all drafter layers are normalised with the first layer's weight",
                         "This is a defect of vLLM's CPU kernel, not of the drafter. On a GPU it is not expected.",
                         lambda: bench.variant(first_key_norm(bench.drafter)))


def catalogue(bench: Bench) -> list[Hypothesis]:
    """All hypotheses that apply, the one without a fault first."""
    found = [Hypothesis(AS_TRAINED, "the engine runs the drafter as it was trained", "", bench.variant)]
    if bench.served is not None:
        found.append(Hypothesis("served_folder", f"the served folder differs from the run: {bench.served_differences}",
                                "Export again, or restore the folder, and restart the server.",
                                lambda: bench.variant(bench.served)))
    for part in (_layers, _slots, _mask, _rope, _matrices, _engine):
        found += part(bench)
    return found


def needed_layers(variants: Sequence[Variant]) -> list[int]:
    """Every layer whose output some variant reads."""
    return sorted({layer for variant in variants for layer in variant.layers})
