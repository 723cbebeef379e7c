"""Random tiny targets of every supported family, and a tokenizer for them."""

from functools import lru_cache
from pathlib import Path

import torch
from golden_families import FAMILIES, FEATURES, ROWS, TINY  # noqa: F401
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.micro_tokenizer import train_tokenizer


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """About 300 ids: the bytes, the special tokens and a few merges."""
    return train_tokenizer(["the quick brown fox jumps over the lazy dog\n"] * 4, 300)


def tiny_model(family: str = "qwen3") -> PreTrainedModel:
    """Random weights large enough for attention, norms, sinks and soft caps to matter."""
    torch.manual_seed(5)
    config = FAMILIES[family]()
    config.get_text_config().initializer_range = TINY[family].spread
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    noise = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "tid2eid" in name:  # the experts that an id is sent to; zeros after initialisation
                tensor.copy_(torch.randint(0, 4, tensor.shape, generator=noise))
            elif tensor.dim() == 1 and tensor.is_floating_point():  # norms, biases, sinks, scales: 0 or 1 at first
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=noise))
            elif ".fn" in name or "hc_fn" in name:  # how streams are mixed
                tensor.normal_(0.0, 0.2, generator=noise)
    return model


def tiny_target(family: str = "qwen3") -> FrozenTarget:
    """The frozen target around ``tiny_model``."""
    return FrozenTarget(tiny_model(family), tiny_tokenizer(), feature_layers=FEATURES, mask_token_id=4, name=family)


@torch.no_grad()
def reference(family: str, ids: torch.Tensor, layers: tuple[int, ...] = FEATURES) -> tuple[torch.Tensor, ...]:
    """Hugging Face's own layer outputs side by side [T, M*D], last hidden states [T, D] and logits [T, V].

    Of several residual streams the mean; the last layer's output, which its ``hidden_states`` lack, by a hook.
    """
    model, raw = tiny_model(family), []
    model.get_decoder().layers[-1].register_forward_hook(
        lambda _module, _arguments, output: raw.append(output[0] if isinstance(output, tuple) else output))
    output = model(ids[None], output_hidden_states=True, use_cache=False)
    states = [*output.hidden_states[1:-1], raw[0]]
    outputs = [state[0].mean(dim=1) if state.dim() == 4 else state[0] for state in states]
    return torch.cat([outputs[layer] for layer in layers], dim=-1), output.hidden_states[-1][0], output.logits[0]


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
