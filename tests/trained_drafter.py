"""Drafters trained in seconds on a random target's own greedy texts, to accept much and to tell layers apart.

A random target soon repeats itself, so a small drafter learns its texts. Briefly trained drafters hardly notice
features of neighbouring layers; these are also taught to say a useless token when they get them, so that a wrong layer
id shows.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from deepspec.artifacts import canonical_hash, sha256_file
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.doctor.reference import layer_outputs
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.export.gates import block_logits
from deepspec.targets.sampling import Sampling

USELESS = 7  # a token of the vocabulary


def greedy_texts(target: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Tensor]:
    """Prompts with the target's greedy answers [T]."""
    decoder = SpeculativeDecoder(target, None, Sampling(temperature=0.0), batch_size=len(prompts),
                                 max_new_tokens=tokens, mode="none", ignore_eos=True)
    requests = [DecodeRequest(str(i), tuple(prompt)) for i, prompt in enumerate(prompts)]
    answers = {item.id: item.token_ids for item in decoder.decode(requests)}
    return [torch.tensor([*prompt, *answers[str(i)]]) for i, prompt in enumerate(prompts)]


def _loss(drafter: Any, tokens: Tensor, states: dict[int, Tensor], anchors: Tensor, shift: int) -> Tensor:
    layers = [layer + shift for layer in drafter.shape.feature_layers]
    features = torch.cat([states[layer] for layer in layers], dim=-1)
    logits = block_logits.__wrapped__(drafter, features, tokens, anchors)  # the original runs without gradients
    places = anchors[:, None] + 1 + torch.arange(logits.shape[1])
    labels = tokens[places] if shift == 0 else torch.full_like(places, USELESS)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(drafter: Any, target: Any, texts: Sequence[Tensor], *, steps: int = 300, lr: float = 4e-3,
          anchors: int = 24, seed: int = 0) -> Any:
    """Train ``drafter`` in place, cross-entropy on ``texts`` and the useless token one layer off; returns it frozen."""
    layers = {layer + shift for layer in drafter.shape.feature_layers for shift in (-1, 0, 1)}
    states = [layer_outputs(target, text.tolist(), sorted(layers)) for text in texts]
    drafter.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    length = drafter.shape.draft_length
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1.0 - step / steps)
        loss = torch.zeros(())
        for place in torch.randint(len(texts), (3,), generator=generator).tolist():
            chosen = torch.randint(1, len(texts[place]) - length, (anchors,), generator=generator)
            loss = loss + _loss(drafter, texts[place], states[place], chosen, 0)
            shift = 1 if step % 2 else -1
            loss = loss + 0.3 * _loss(drafter, texts[place], states[place], chosen[:8], shift)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def make_trained(target: Any, shape: DrafterShape, prompts: Sequence[Sequence[int]], *, tokens: int = 72,
                 steps: int = 300, seed: int = 1) -> Any:
    """A fresh drafter of ``shape`` trained on the target's greedy answers to ``prompts``.

    With DEEPSPEC_TRAINED_DRAFTERS, a folder, its weights are kept there and read the next time.
    """
    torch.manual_seed(seed)
    drafter = build_drafter(shape, SharedWeights(target.embed_weight, target.lm_head_weight, target.fingerprint))
    recipe = [asdict(shape), [list(prompt) for prompt in prompts], tokens, steps, seed, target.fingerprint,
              sha256_file(Path(__file__))]
    folder = os.environ.get("DEEPSPEC_TRAINED_DRAFTERS")
    kept = Path(folder) / f"{canonical_hash(recipe)[:16]}.safetensors" if folder else None
    if kept is not None and kept.is_file():
        drafter.load_state_dict(load_file(kept))
        return drafter.eval().requires_grad_(False)
    train(drafter, target, greedy_texts(target, prompts, tokens), steps=steps, seed=seed)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_file(drafter.state_dict(), kept)
    return drafter


def prompt_ids(count: int, words: int, seed: int = 3, longest: int = 10) -> list[list[int]]:
    """Random prompts of mixed lengths from the first ``words`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
    return [torch.randint(8, words, (length,), generator=generator).tolist() for length in lengths]


def write_prompts(path: Path, prompts: Sequence[Sequence[int]]) -> Path:
    """A file of prompts whose words ``w<id>`` are single tokens."""
    path.write_text("".join(json.dumps({"prompt": " ".join(f"w{token}" for token in ids)}) + "\n" for ids in prompts))
    return path
