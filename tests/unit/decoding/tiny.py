"""Random tiny targets and drafters, real classes throughout. Vocabularies small enough to count outcomes."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from deepspec.decoding.types import DecodeRequest
from deepspec.drafters.dspark import DSparkDrafter
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.targets.frozen import FrozenTarget

LAYERS = (0, 2)


class Vocabulary:
    """As much of a tokenizer as a target reads."""

    def __init__(self, size: int, eos_token_id: int) -> None:
        self.size, self.eos_token_id = size, eos_token_id

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.size)}


def tiny_target(vocab: int = 48, padded: int = 64, eos: int = 1, seed: int = 0, scale: float = 6.0,
                layers: tuple[int, ...] = LAYERS) -> FrozenTarget:
    """Four random layers; ``scale`` on the LM head makes the distributions uneven."""
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=padded, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
                         max_position_embeddings=512, eos_token_id=eos)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_output_embeddings().weight.data.mul_(scale)
    tokenizer: Any = Vocabulary(vocab, eos)
    return FrozenTarget(model, tokenizer, feature_layers=layers, mask_token_id=2)


def tiny_drafter(target: FrozenTarget, seed: int = 1, kind: Any = DSparkDrafter, **changes: Any) -> DSparkDrafter:
    """A random drafter of the target's width."""
    spec = target.spec
    values: dict[str, Any] = dict(
        algorithm="dspark", hidden_size=spec.hidden_size, intermediate_size=96, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, vocab_size=spec.vocab_size, rms_norm_eps=1e-6, rope_theta=10000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512, block_size=4,
        sample_from_anchor=True, head="vanilla", markov_rank=8, confidence_head=True, confidence_with_markov=True,
        mask_token_id=2, feature_layers=LAYERS, num_target_layers=spec.num_layers, target_hidden_size=spec.hidden_size,
        target_model_type="qwen3")
    shared = SharedWeights(target.embed_weight, target.lm_head_weight, "tiny")
    torch.manual_seed(seed)
    drafter = kind(DrafterShape(**values | changes), shared).eval()
    if drafter.confidence_head is not None:
        torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.3)
    if drafter.markov_head is not None:  # published heads start near zero: make this one matter
        torch.nn.init.normal_(drafter.markov_head.markov_w1.weight)
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter.requires_grad_(False)


def recurrent_target(**options: Any) -> dict[str, FrozenTarget]:
    """The same target once for each autoregressive algorithm: MTP takes the last hidden state."""
    return {name: tiny_target(layers=layers, **options) for name, layers in (("eagle3", LAYERS), ("mtp", (3,)))}


def recurrent_drafter(target: FrozenTarget, algorithm: str, seed: int = 1, **changes: Any) -> Any:
    """A random autoregressive drafter of the target's width, whose parts all matter."""
    spec = target.spec
    values: dict[str, Any] = dict(
        algorithm=algorithm, hidden_size=spec.hidden_size, intermediate_size=96, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=16, vocab_size=spec.vocab_size, rms_norm_eps=1e-6, rope_theta=10000.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512, block_size=4,
        sample_from_anchor=True, head="none", markov_rank=0, confidence_head=False, confidence_with_markov=False,
        mask_token_id=2, feature_layers=target.feature_layers, num_target_layers=spec.num_layers,
        target_hidden_size=spec.hidden_size, target_model_type="qwen3")
    shared = SharedWeights(target.embed_weight, target.lm_head_weight, "tiny")
    torch.manual_seed(seed)
    drafter = build_drafter(DrafterShape(**values | changes), shared).eval()
    for parameter in drafter.parameters():
        parameter.data.mul_(4.0 if parameter.ndim > 1 else 1.0).add_(torch.randn_like(parameter) * 0.05)
    return drafter.requires_grad_(False)


def prompts(count: int, vocab: int = 48, seed: int = 3, longest: int = 12) -> list[DecodeRequest]:
    """Random prompts of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    texts = [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
    return [DecodeRequest(id=f"p{i}", prompt_ids=tuple(text), domain="math" if i % 2 else "chat")
            for i, text in enumerate(texts)]
