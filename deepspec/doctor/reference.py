"""The reference: prompts, the target's own greedy continuations of them, and hidden states of every layer asked for.

T tokens of one text, D width.
"""

import itertools
import logging
from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.config.paths import responses_dir
from deepspec.config.schema import BenchmarkConfig, Config
from deepspec.data.prompt_rows import is_slot
from deepspec.data.rendering import Renderer, RenderError
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.errors import InputRefused
from deepspec.evaluation.benchmarks import Conversation, load_benchmark
from deepspec.targets.sampling import Sampling

log = logging.getLogger(__name__)
EMBEDDING = -1  # the "layer" before the first one
_BATCH = 16
_FAR = 1e3  # logits


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the first answer, and its token ids by our renderer."""

    id: str
    messages: tuple[dict[str, Any], ...]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A prompt and what follows it: the answer that was served, and as many tokens as its last round may draft."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    more: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens."""
        return self.prompt + self.answer + self.more


def _interleaved(conversations: Sequence[Conversation]) -> list[Conversation]:
    """One of every domain in turn, so that few prompts still hold all domains."""
    groups: dict[str, list[Conversation]] = {}
    for item in conversations:
        groups.setdefault(item.domain, []).append(item)
    rounds = itertools.zip_longest(*groups.values())
    return [item for items in rounds for item in items if item is not None]


def read_prompts(config: Config, renderer: Renderer, longest: Optional[int]) -> list[Prompt]:
    """First turns of ``doctor.prompts`` that leave room for the answer within ``longest`` tokens (None: no bound).

    Raises InputRefused when none is left.
    """
    options = config.doctor
    benchmark = load_benchmark(BenchmarkConfig(name="doctor", path=options.prompts), responses_dir(config))
    found: list[Prompt] = []
    skipped = 0
    for item in _interleaved(benchmark.conversations):
        turn = next((place for place, message in enumerate(item.messages) if is_slot(message)), len(item.messages))
        try:
            ids = tuple(renderer.prompt_ids(item.messages[:turn], item.tools))
        except RenderError:
            continue
        if item.tools is not None:
            continue
        if longest is not None and len(ids) + options.max_new_tokens > longest:
            skipped += 1
        else:
            found.append(Prompt(item.id, tuple(item.messages[:turn]), ids))
        if len(found) == options.max_prompts:
            break
    if not found:
        raise InputRefused(f"doctor.prompts={options.prompts!r} has no prompt that leaves room for "
                           f"doctor.max_new_tokens={options.max_new_tokens} within the server's {longest} tokens "
                           f"({skipped} are too long). Start the server with a longer max_model_len, or give other "
                           "prompts or a smaller number.")
    if skipped:
        log.warning("%d reference prompts are left out: with doctor.max_new_tokens=%d they do not fit the %d tokens "
                    "that the server's model length leaves; %d are asked", skipped, options.max_new_tokens, longest,
                    len(found))
    return found


def greedy_answers(target: Any, drafter: nn.Module, prompts: Sequence[Prompt], tokens: int) -> list[tuple[int, ...]]:
    """The target's greedy continuations of ``tokens`` tokens each, end-of-turn tokens ignored."""
    decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=0.0), batch_size=_BATCH, max_new_tokens=tokens,
                                 ignore_eos=True)
    requests = [DecodeRequest(str(number), prompt.ids) for number, prompt in enumerate(prompts)]
    results = {item.id: item.token_ids for item in decoder.decode(requests)}
    return [tuple(results[str(number)]) for number in range(len(prompts))]


class RestrictedTarget:
    """A target that answers with some tokens only; everything else is the target's own."""

    def __init__(self, target: Any, only: Sequence[int]) -> None:
        self._target = target
        self._only = torch.tensor(list(only))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits, -inf for every other token."""
        logits: Tensor = self._target.logits(hidden)
        only = self._only.to(logits.device)
        return torch.full_like(logits, -torch.inf).index_copy(-1, only, logits.index_select(-1, only))


def restricted_answer(target: Any, ids: Sequence[int], only: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The greedy continuation of ``ids`` by ``tokens`` tokens, all of them from ``only``."""
    decoder = SpeculativeDecoder(RestrictedTarget(target, only), None, Sampling(temperature=0.0), batch_size=1,
                                 max_new_tokens=tokens, mode="none", ignore_eos=True)
    result, = decoder.decode([DecodeRequest("trial", tuple(ids))])
    return tuple(result.token_ids)


@torch.no_grad()
def layer_outputs(target: Any, ids: Sequence[int], layers: Sequence[int]) -> dict[int, Tensor]:
    """Outputs [T, D] of the decoder layers named, before any final norm; ``EMBEDDING`` is what enters the first."""
    tokens = torch.tensor(list(ids), dtype=torch.int64)
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            found[layer] = (output[0] if isinstance(output, tuple) else output)[0].detach().clone()
        return hook

    wanted = sorted({layer for layer in layers if layer != EMBEDDING})
    handles = [target.layers[layer].register_forward_hook(keep(layer)) for layer in wanted]
    try:
        target.encode(tokens, [len(tokens)], features=False)
    finally:
        for handle in handles:
            handle.remove()
    if EMBEDDING in layers:
        found[EMBEDDING] = functional.embedding(tokens.to(target.device), target.embed_weight) * target.spec.embed_scale
    return found


@torch.no_grad()
def greedy_margin(target: Any, ids: Sequence[int], place: int, token: int) -> float:
    """How much the target prefers its own token at ``place`` to ``token``, in logits; 0 where it agrees.

    An id that no token of the tokenizer has (padding of the embedding) counts as far off.
    """
    hidden = target.encode(torch.tensor(list(ids[:place])), [place], features=False).last_hidden[-1:]
    logits = target.logits(hidden)[0]
    return min(float(logits.max() - logits[token]), _FAR)
