"""Random tiny targets of several families, and a tokenizer for them."""

from functools import lru_cache
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, PreTrainedModel, PreTrainedTokenizerFast,
    Qwen3Config,
)

from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.micro_tokenizer import train_tokenizer

ROWS = 320  # of the embedding; the tokenizer has fewer
FEATURES = (0, 2)
_SIZES = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 3,
}
FAMILIES = {
    "qwen3": lambda: Qwen3Config(**_SIZES, tie_word_embeddings=False),
    "qwen3_tied": lambda: Qwen3Config(**_SIZES, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_SIZES, attention_bias=True),
    "mistral_window": lambda: MistralConfig(**_SIZES, sliding_window=7),
    "gemma2": lambda: Gemma2Config(**_SIZES, sliding_window=5, query_pre_attn_scalar=16, final_logit_softcapping=3.0,
                                   attn_logit_softcapping=2.0),
}


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """About 300 ids: the bytes, the special tokens and a few merges."""
    return train_tokenizer(["the quick brown fox jumps over the lazy dog\n"] * 4, 300)


def tiny_model(family: str = "qwen3") -> PreTrainedModel:
    """Random weights large enough for attention and soft caps to matter."""
    torch.manual_seed(5)
    config = FAMILIES[family]()
    config.initializer_range = 0.3
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tiny_target(family: str = "qwen3") -> FrozenTarget:
    """The frozen target around ``tiny_model``."""
    return FrozenTarget(tiny_model(family), tiny_tokenizer(), feature_layers=FEATURES, mask_token_id=4, name=family)


def save_tiny(folder: Path, family: str = "qwen3", shard_size: str = "5GB", **changes: object) -> PreTrainedModel:
    """A Hugging Face folder with model and tokenizer."""
    model = tiny_model(family)
    for key, value in changes.items():
        setattr(model.config, key, value)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return model


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    """Token ids that the tokenizer has."""
    return torch.randint(5, 290, (count,), generator=torch.Generator().manual_seed(seed))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 rounding relative to the largest entry: sums of large terms may cancel."""
    torch.testing.assert_close(actual, expected, atol=2e-5 * max(1.0, float(expected.abs().max())), rtol=0.0)
