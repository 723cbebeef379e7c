"""The frozen target: hidden states of chosen layers, next-token logits, and a cache for decoding.

Shapes: T tokens of a flat batch without padding, D width, M feature layers, V rows of the embedding.
Feature layer ``i`` is the output of decoder layer ``i``, which is ``hidden_states[i + 1]`` in Hugging Face's counting;
the last layer's, which only MTP takes, and alone, is there as here the hidden state after the final norm.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.attention import PACKED_ATTENTION, DocumentLayout, PackedLayout
from deepspec.targets.cache import CacheLayout, PackedCache
from deepspec.targets.spec import TargetSpec

_CHECK_TOKENS = 24
_CHECK_SAMPLE = 256  # tokens of a real sample
_LAYER_TYPES = ("full_attention", "sliding_attention")
_VOLATILE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures",
                  "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache")


@dataclass(frozen=True)
class TargetFeatures:
    """Hidden states of one pass. Detached, in the target's dtype."""

    features: Tensor  # [T, M*D] outputs of the chosen layers side by side; [T, 0] where none were asked for
    last_hidden: Tensor  # [T, D] after the final norm; row t predicts the token after t


class FrozenTarget:
    """A Hugging Face causal LM that is only read. Every method runs without gradients."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *,
                 feature_layers: Sequence[int] = (), mask_token_id: Optional[int] = None, name: str = "target") -> None:
        self._model: Any = model
        self._model.eval().requires_grad_(False)
        self._decoder: Any = self._model.get_decoder()
        self.name = name
        self.tokenizer = tokenizer
        self.layers: nn.ModuleList = self._decoder.layers
        self.embed_weight = _weight(model.get_input_embeddings())  # [V, D]
        self.lm_head_weight = _weight(model.get_output_embeddings())  # [V, D]
        self.final_norm_weight: Optional[Tensor] = getattr(getattr(self._decoder, "norm", None), "weight", None)  # [D]
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        extra = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        if tokenizer.eos_token_id is not None:
            extra.append(tokenizer.eos_token_id)
        rows = self.embed_weight.shape[0]
        self.spec = TargetSpec.from_hf_config(model.config, vocab_rows=rows, eos_token_ids=extra)
        self.device: torch.device = self.embed_weight.device
        self.dtype: torch.dtype = self.embed_weight.dtype
        self.tokenizer_size = min(max(tokenizer.get_vocab().values()) + 1, self.spec.vocab_size)
        self.feature_layers = check_layers(feature_layers, self.spec.num_layers, name)
        self.mask_token_id = check_mask(mask_token_id, self.spec.vocab_size, name)
        _check_attention(model.config.get_text_config(), name)
        own = model.config._attn_implementation
        self._attention = "sdpa" if own == PACKED_ATTENTION else own
        self._model.set_attn_implementation(PACKED_ATTENTION)
        self._sink: Optional[Tensor] = None  # [T, M*D] while one of our own passes runs
        self._last_only = self.feature_layers == (self.spec.num_layers - 1,)
        for column, layer in enumerate(() if self._last_only else self.feature_layers):
            self.layers[layer].register_forward_hook(self._feature_hook(column))

    def _feature_hook(self, column: int) -> Any:
        """Copy a layer's output into its columns: memory grows with the chosen layers only."""
        begin, end = column * self.spec.hidden_size, (column + 1) * self.spec.hidden_size

        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if self._sink is not None:
                self._sink[:, begin:end] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    @torch.no_grad()
    def encode(self, input_ids: Tensor, lengths: Sequence[int], *, features: bool = True) -> TargetFeatures:
        """Hidden states of documents laid end to end, each causal on its own and starting at position 0.

        ``input_ids`` [T] int64; ``lengths`` tokens of every document, summing to T. ``features=False`` skips the
        chosen layers. Raises InputRefused for an id outside the embedding.
        """
        ids = self._checked_ids(input_ids)
        if sum(lengths) != ids.shape[0] or min(lengths, default=0) < 1:
            raise ValueError(f"lengths {list(lengths)} must be positive and sum to the {ids.shape[0]} tokens given")
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        return self._forward(ids, positions, DocumentLayout(tuple(lengths)), features)

    def new_cache(self, rows: int, capacity: int) -> PackedCache:
        """An empty cache for ``rows`` sequences of ``capacity`` tokens each; it grows when a row needs more."""
        return PackedCache(
            rows, capacity, num_layers=self.spec.num_layers, num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def step(self, input_ids: Tensor, rows: Sequence[int], counts: Sequence[int], cache: PackedCache, *,
             features: bool = True) -> TargetFeatures:
        """Append ``counts[i]`` tokens to cache row ``rows[i]`` (flat, in that order) and return their hidden states.

        Rows may prefill, decode and verify in the same step; positions continue from ``cache.lengths``, which
        afterwards have grown by ``counts``. Rows that are not named stay as they are. Raises InputRefused for an id
        outside the embedding; the lengths are then unchanged.
        """
        ids = self._checked_ids(input_ids)
        if sum(counts) != ids.shape[0]:
            raise ValueError(f"counts {list(counts)} must sum to the {ids.shape[0]} tokens given")
        layout = CacheLayout(cache, rows, counts)
        result = self._forward(ids, layout.positions, layout, features)
        layout.commit(rows, counts)
        return result

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Next-token logits [T, V] float32 of ``last_hidden`` [T, D], soft-capped where the target does so.

        Rows of the embedding that no token of the tokenizer has (padding) are -inf: they are never sampled.
        """
        logits = self._raw_logits(last_hidden)
        if self.tokenizer_size < logits.shape[-1]:
            logits[..., self.tokenizer_size:] = float("-inf")
        return logits

    @torch.no_grad()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """The last layer's output [T, D] to the last hidden state [T, D], for states captured before that norm."""
        return self._decoder.norm(hidden.to(self.device, self.dtype))

    def _raw_logits(self, last_hidden: Tensor) -> Tensor:
        return head_logits(last_hidden, self.lm_head_weight, self.spec.final_logit_softcap)

    def _forward(self, ids: Tensor, positions: Tensor, layout: PackedLayout, features: bool) -> TargetFeatures:
        wanted = len(self.feature_layers) * self.spec.hidden_size if features else 0
        sink = torch.empty(ids.shape[0], 0 if self._last_only else wanted, dtype=self.dtype, device=self.device)
        self._sink = sink if wanted else None
        try:
            output = self._decoder(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, packed=layout,
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device),  # 4-D: taken as it is
            )
        finally:
            self._sink = None
        last_hidden = output.last_hidden_state[0]
        return TargetFeatures(features=last_hidden if wanted and self._last_only else sink, last_hidden=last_hidden)

    def _checked_ids(self, input_ids: Tensor) -> Tensor:
        if input_ids.dim() != 1 or input_ids.shape[0] == 0:
            raise ValueError(f"input_ids must be a flat, non-empty tensor, not of shape {tuple(input_ids.shape)}")
        low, high = (int(value) for value in torch.aminmax(input_ids))
        if low < 0 or high >= self.spec.vocab_size:
            wrong = low if low < 0 else high
            index = int((input_ids == wrong).nonzero()[0])
            raise InputRefused(
                f"Token id {wrong} at index {index} of the batch is outside the embedding of {self.name}, which has "
                f"{self.spec.vocab_size} rows (0 .. {self.spec.vocab_size - 1}). Tokenise the text with this target's "
                "own tokenizer."
            )
        return input_ids.to(self.device)

    @torch.no_grad()
    def self_check(self) -> float:
        """Compare ``lm_head(last_hidden)`` of a packed pass and of cached steps with the model's own logits.

        Returns the largest difference. Raises InputRefused when it exceeds rounding: the final norm, a scale, or a
        kind of attention is then not what this class assumes, and every feature would be wrong.
        """
        ids = torch.arange(_CHECK_TOKENS, device=self.device) * 7919 % self.tokenizer_size
        first = _CHECK_TOKENS // 3
        split = [first, _CHECK_TOKENS - first]
        packed = self._raw_logits(self.encode(ids, split, features=False).last_hidden)
        cache = self.new_cache(2, _CHECK_TOKENS)
        steps = [self.step(ids[:-1], [0, 1], [first, split[1] - 1], cache, features=False),
                 self.step(ids[-1:], [1], [1], cache, features=False)]
        cached = self._raw_logits(torch.cat([step.last_hidden for step in steps]))
        reference = torch.cat([self._own_logits(part) for part in ids.split(split)])
        return self._same_logits((packed, cached), reference)

    @torch.no_grad()
    def check_sample(self, input_ids: Tensor, last_hidden: Tensor) -> float:
        """The same for hidden states [T, D] of a real sample [T] int64, over its first tokens."""
        ids = input_ids[:_CHECK_SAMPLE].to(self.device)
        return self._same_logits((self._raw_logits(last_hidden[:_CHECK_SAMPLE].to(self.device, self.dtype)),),
                                 self._own_logits(ids))

    def _own_logits(self, ids: Tensor) -> Tensor:
        """[T, V] float32 of the model as it is, without our attention."""
        self._model.set_attn_implementation(self._attention)
        try:
            return self._model(ids[None], use_cache=False).logits[0].float()
        finally:
            self._model.set_attn_implementation(PACKED_ATTENTION)

    def _same_logits(self, found: Sequence[Tensor], reference: Tensor) -> float:
        difference = max(float((logits - reference).abs().max()) for logits in found)
        relative = difference / max(float(reference.abs().max()), 1.0)
        if not relative <= (1e-3 if self.dtype == torch.float32 else 5e-2):
            raise InputRefused(
                f"The hidden states of {self.name} ({self.spec.model_type}) do not reproduce its logits: they differ "
                f"by {difference:.3g} for logits up to {float(reference.abs().max()):.3g}. This architecture needs an "
                "adapter in deepspec/targets."
            )
        return difference

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every tensor (name, shape, dtype, bytes) and the configuration."""
        total = hashlib.sha256(hash_config(self._model.config))
        state = sorted(self._model.state_dict().items())
        with ThreadPoolExecutor(4) as pool:  # hashlib releases the interpreter lock
            for digest in pool.map(hash_tensor, *zip(*state)):
                total.update(digest)
        return total.hexdigest()


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.detach()


def head_logits(last_hidden: Tensor, lm_head: Tensor, cap: Optional[float]) -> Tensor:
    """[T, D] and [V, D] to logits [T, V] float32, soft-capped at ``cap`` unless that is None."""
    logits = F.linear(last_hidden, lm_head).float()
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def hash_config(config: Any) -> bytes:
    """A Hugging Face configuration, without what says nothing about the weights, as bytes to hash."""
    kept = {key: value for key, value in config.to_diff_dict().items() if key not in _VOLATILE_KEYS}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def hash_tensor(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of name, shape, dtype and bytes."""
    digest = hashlib.sha256(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def check_layers(layers: Sequence[int], num_layers: int, name: str) -> tuple[int, ...]:
    """``target.feature_layers`` as a tuple. Raises ConfigError for ids that no engine can capture or that repeat."""
    chosen = tuple(int(layer) for layer in layers)
    for layer in chosen:
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"target.feature_layers={list(chosen)}: {layer} is not a decoder layer of {name}, which has "
                f"{num_layers} layers. Use ids from 0 to {num_layers - 2}; id i is the output of layer i."
            )
    if num_layers - 1 in chosen and len(chosen) > 1:
        raise ConfigError(
            f"target.feature_layers={list(chosen)}: layer {num_layers - 1} is the last of {name}'s {num_layers} "
            f"layers, whose output serving engines cannot capture beside others. Use ids from 0 to {num_layers - 2}."
        )
    if list(chosen) != sorted(set(chosen)):
        raise ConfigError(f"target.feature_layers={list(chosen)} must be ascending, without repetition. "
                          f"Write {sorted(set(chosen))}.")
    return chosen


def check_mask(mask_token_id: Optional[int], rows: int, name: str) -> Optional[int]:
    """``target.mask_token_id``. Raises ConfigError where the embedding has no such row."""
    if mask_token_id is not None and not 0 <= mask_token_id < rows:
        raise ConfigError(
            f"target.mask_token_id={mask_token_id} is not a row of {name}'s embedding, which has {rows} rows. Give "
            "the id of a special token that text never contains, or of a padding row."
        )
    return mask_token_id


def _check_attention(config: Any, name: str) -> None:
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if getattr(config, "kv_lora_rank", None) is not None:
        unknown.append("latent attention (kv_lora_rank)")
    if unknown:
        raise InputRefused(
            f"{name} ({config.model_type}) has layers of type {', '.join(unknown)}; packed attention knows "
            f"{' and '.join(_LAYER_TYPES)}. This architecture needs an adapter in deepspec/targets."
        )
