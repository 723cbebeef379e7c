"""The micro target: a thin Qwen3-shaped chat model, trained here in minutes on text that every machine has.

It exists for acceptance tests: deep enough that a one-layer drafter is not nearly the target itself, small enough to
decode thousands of tokens a second, and a language model rather than noise, so that acceptance can be learnt.
"""

import logging
import math
import os
import platform
import random
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deepspec.artifacts import canonical_hash
from deepspec.targets import micro_tokenizer
from deepspec.targets.micro_corpus import Message, conversations
from deepspec.targets.once import build_once
from deepspec.targets.quiet import quiet_transformers

_log = logging.getLogger(__name__)
_RECIPE = 1  # raise when the corpus, the template or the loop changes what comes out
_IGNORED = -100


@dataclass(frozen=True)
class MicroConfig:
    """Shape and training of the micro target. The defaults are the one that acceptance tests use."""

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    tokenizer_size: int = 2048
    embedding_rows: int = 2112  # a multiple of 64 beyond the tokenizer: rows that no token has
    max_length: int = 384  # tokens of a training sample
    steps: int = 360
    batch_tokens: int = 2048
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.05
    chats: Optional[int] = None  # use so many conversations; null: all
    seed: int = 0


DEFAULT = MicroConfig()


@contextmanager
def _settings(seed: int) -> Iterator[None]:
    """All cores and a private random state: the caller's threads and generators are as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, len(os.sched_getaffinity(0))))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _texts(chats: list[list[Message]]) -> Iterator[str]:
    for chat in chats:
        for message in chat:
            yield f"{message['role']}\n{message['content']}"


def _encode(tokenizer: PreTrainedTokenizerFast, chats: list[list[Message]], max_length: int) -> list[list[int]]:
    rendered = tokenizer.apply_chat_template(chats, tokenize=False)
    return [ids[:max_length] for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"]]


def _batches(samples: list[list[int]], config: MicroConfig) -> Iterator[Tensor]:
    """Endless batches [B, S] of samples of similar length, padded with -100; each epoch in another order."""
    order = random.Random(config.seed)
    while True:
        # Noise on the length mixes the batches of an epoch; neighbours still need little padding.
        ranked = sorted(samples, key=lambda ids: len(ids) * order.uniform(0.9, 1.1))
        batches: list[list[list[int]]] = [[]]
        for ids in ranked:
            longest = max(len(ids), max((len(other) for other in batches[-1]), default=0))
            if batches[-1] and longest * (len(batches[-1]) + 1) > config.batch_tokens:
                batches.append([])
            batches[-1].append(ids)
        order.shuffle(batches)
        for batch in batches:
            width = max(len(ids) for ids in batch)
            yield torch.tensor([ids + [_IGNORED] * (width - len(ids)) for ids in batch])


def _new_model(config: MicroConfig) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=config.embedding_rows, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=micro_tokenizer.END_ID, pad_token_id=micro_tokenizer.PAD_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, dtype="float32"))
    model.generation_config = GenerationConfig(
        eos_token_id=micro_tokenizer.END_ID, pad_token_id=micro_tokenizer.PAD_ID)
    return model


def _loss(model: Qwen3ForCausalLM, batch: Tensor) -> Tensor:
    inputs = batch.clamp_min(0)[:, :-1]  # padding is to the right, so causality hides it
    hidden = model.model(inputs, use_cache=False).last_hidden_state
    kept = batch[:, 1:] != _IGNORED
    return F.cross_entropy(model.lm_head(hidden[kept]), batch[:, 1:][kept])


def _train(model: Qwen3ForCausalLM, samples: list[list[int]], config: MicroConfig) -> float:
    """AdamW with warm-up and cosine. Returns the mean loss of the last twentieth of the steps, nats per token."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    warmup = max(1, round(config.steps * config.warmup_fraction))

    def factor(step: int) -> float:
        progress = max(0.0, (step - warmup) / max(1, config.steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses: list[float] = []
    batches = _batches(samples, config)
    progress = tqdm(range(config.steps), desc="micro target", unit="step", mininterval=2.0)
    for _ in progress:
        loss = _loss(model, next(batches))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    tail = losses[-max(1, config.steps // 20):]
    return sum(tail) / len(tail)


def _make(folder: Path, config: MicroConfig) -> dict[str, Any]:
    started = time.monotonic()
    _log.info("Training the micro target (once, %d steps, a few minutes)", config.steps)
    chats = conversations(config.seed)[:config.chats]
    tokenizer = micro_tokenizer.train_tokenizer(_texts(chats), config.tokenizer_size)
    samples = _encode(tokenizer, chats, config.max_length)
    with _settings(config.seed):
        model = _new_model(config)
        loss = _train(model, samples, config)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return {"loss": loss, "seconds": time.monotonic() - started, "chats": len(samples),
            "tokens": sum(len(ids) for ids in samples)}


def ensure_micro(cache_dir: Path, config: MicroConfig = DEFAULT) -> Path:
    """Folder under ``cache_dir`` with the micro target (Hugging Face layout), trained by the first process that asks.

    Its manifest records the loss (nats per token) and the seconds. The text depends on the Python version, so that is
    part of the folder's name. Raises InputRefused when Python's sources are not on this machine.
    """
    identity = asdict(config) | {"python": platform.python_version(), "recipe": _RECIPE}
    fingerprint = canonical_hash(identity)
    return build_once(
        Path(cache_dir) / f"micro-{fingerprint[:8]}", producer="targets.micro", fingerprint=fingerprint,
        config=identity, seed=config.seed, build=lambda folder: _make(folder, config))
