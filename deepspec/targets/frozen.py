"""The frozen target: hidden states of chosen layers, next-token logits, and a cache for decoding.

Shapes: T tokens of a flat batch without padding, D width, M feature layers, V rows of the embedding.
Feature layer ``i`` is the output of decoder layer ``i``, which is ``hidden_states[i + 1]`` in Hugging Face's counting;
the last layer's, which only MTP takes, and alone, is there as here the hidden state after the final norm. Where layers
hand on several residual streams (DeepSeek-V4), their outputs are the mean over the streams, the last layer's too, and
the last hidden state is what follows the model's own weighing of the streams and the final norm.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from deepspec.errors import InputRefused
from deepspec.targets.attention import PACKED_ATTENTION
from deepspec.targets.families import family_of
from deepspec.targets.identity import hash_config, hash_tensor
from deepspec.targets.options import check_layers, check_mask
from deepspec.targets.passes import PackedPass, Pass, RowPass, RowsOfTokens
from deepspec.targets.rope import keep_one_table
from deepspec.targets.sink import FeatureSink
from deepspec.targets.spec import TargetSpec
from deepspec.targets.tensor_files import TensorFiles, fingerprint_of_files, stored_names

_CHECK_TOKENS = 24
_CHECK_SAMPLE = 256  # tokens of a real sample
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TargetFeatures:
    """Hidden states of one pass. Detached, in the target's dtype."""

    features: Tensor  # [T, M*D] outputs of the chosen layers side by side; [T, 0] where none were asked for
    last_hidden: Tensor  # [T, D] after the final norm; row t predicts the token after t


class FrozenTarget:
    """A Hugging Face causal LM that is only read. Every method runs without gradients."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *,
                 feature_layers: Sequence[int] = (), mask_token_id: Optional[int] = None, name: str = "target",
                 files: Optional[TensorFiles] = None) -> None:
        """``files`` are those the model came from, if any."""
        self.family = family_of(model.config.model_type, name)
        self._model: Any = model
        self._files = files
        self._model.eval().requires_grad_(False)
        self._decoder: Any = self._model.get_decoder()
        keep_one_table(self._decoder)
        self.name = name
        self.tokenizer = tokenizer
        self.layers: nn.ModuleList = self._decoder.layers
        self.embed_weight = _weight(model.get_input_embeddings())  # [V, D]
        self.lm_head_weight = _weight(model.get_output_embeddings())  # [V, D]
        self.final_norm_weight: Optional[Tensor] = getattr(getattr(self._decoder, "norm", None), "weight", None)  # [D]
        self.stream_head: Optional[nn.Module] = getattr(self._decoder, "hc_head", None)  # collapse of V4's streams
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
        self.feature_layers = check_layers(feature_layers, self.spec.num_layers, name, last=self.family.streams)
        self.mask_token_id = check_mask(mask_token_id, self.spec.vocab_size, name)
        own = model.config._attn_implementation
        self._attention = "sdpa" if own == PACKED_ATTENTION else own
        self._pass: Pass = RowPass(self._decoder)
        if self.family.packed:
            _check_attention(model.config.get_text_config(), name)
            self._pass = PackedPass(self._decoder, self.dtype)
            self._model.set_attn_implementation(PACKED_ATTENTION)
        self._sink: Optional[FeatureSink] = None  # while one of our own passes runs
        last = self.spec.num_layers - 1
        self._last_only = self.feature_layers == (last,) and not self.family.streams
        for column, layer in enumerate(() if self._last_only else self.feature_layers):
            self.layers[layer].register_forward_hook(self._feature_hook(column))

    def _feature_hook(self, column: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if self._sink is not None:
                self._sink.put(column, output)

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
        sink = self._new_sink(len(ids), features)
        return self._collected(sink, features, lambda: self._pass.encode(ids, lengths, sink))

    def new_cache(self, rows: int, capacity: int) -> RowsOfTokens:
        """An empty cache for ``rows`` sequences of ``capacity`` tokens each; it grows when a row needs more."""
        return self._pass.new_cache(rows, capacity)

    @torch.no_grad()
    def step(self, input_ids: Tensor, rows: Sequence[int], counts: Sequence[int], cache: RowsOfTokens, *,
             features: bool = True) -> TargetFeatures:
        """Append ``counts[i]`` tokens to cache row ``rows[i]`` (flat, in that order) and return their hidden states.

        Rows may prefill, decode and verify in the same step; positions continue from ``cache.lengths``, which
        afterwards have grown by ``counts``. Rows that are not named stay as they are. Raises InputRefused for an id
        outside the embedding; the lengths are then unchanged.
        """
        ids = self._checked_ids(input_ids)
        if sum(counts) != ids.shape[0]:
            raise ValueError(f"counts {list(counts)} must sum to the {ids.shape[0]} tokens given")
        sink = self._new_sink(len(ids), features)
        return self._collected(sink, features, lambda: self._pass.step(ids, rows, counts, cache, sink))

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Next-token logits [T, V] float32 of ``last_hidden`` [T, D], scaled and soft-capped as the target does it.

        Rows of the embedding that no token of the tokenizer has (padding) are -inf: they are never sampled.
        """
        logits = self._raw_logits(last_hidden)
        if self.tokenizer_size < logits.shape[-1]:
            logits[..., self.tokenizer_size:] = float("-inf")
        return logits

    @torch.no_grad()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """The last layer's output [T, D] to the last hidden state [T, D], for states captured before that norm.

        Raises InputRefused where that output is a mean of residual streams, which the model weighs instead.
        """
        refuse_streams(self.family.streams, self.name)
        return self._decoder.norm(hidden.to(self.device, self.dtype))

    def _raw_logits(self, last_hidden: Tensor) -> Tensor:
        return head_logits(last_hidden, self.lm_head_weight, self.spec)

    def _new_sink(self, tokens: int, features: bool) -> Optional[FeatureSink]:
        if not features or not self.feature_layers or self._last_only:
            return None
        return FeatureSink(tokens, len(self.feature_layers), self.spec.hidden_size, self.dtype, self.device)

    def _collected(self, sink: Optional[FeatureSink], features: bool, run: Callable[[], Tensor]) -> TargetFeatures:
        self._sink = sink
        try:
            last_hidden = run()
        finally:
            self._sink = None
        if sink is not None:
            return TargetFeatures(features=sink.values, last_hidden=last_hidden)
        last = features and self._last_only
        return TargetFeatures(features=last_hidden if last else last_hidden[:, :0], last_hidden=last_hidden)

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
        if not self.family.packed:
            return self._model(ids[None], use_cache=False).logits[0].float()
        self._model.set_attn_implementation(self._attention)
        try:
            return self._model(ids[None], use_cache=False).logits[0].float()
        finally:
            self._model.set_attn_implementation(PACKED_ATTENTION)

    def _same_logits(self, found: Sequence[Tensor], reference: Tensor) -> float:
        """Rounding in half precision may send single tokens to other experts: there the median token counts."""
        difference = max(float((logits - reference).abs().max()) for logits in found)
        exact = self.dtype == torch.float32
        typical = max(float((logits - reference).abs().amax(dim=-1).median()) for logits in found)
        judged = difference if exact else typical
        if not judged / max(float(reference.abs().max()), 1.0) <= (1e-3 if exact else 5e-2):
            raise InputRefused(
                f"The hidden states of {self.name} ({self.spec.model_type}) do not reproduce its logits: they differ "
                f"by {judged:.3g} for logits up to {float(reference.abs().max()):.3g}. This architecture needs an "
                "adapter in deepspec/targets (docs/adding-a-target.md)."
            )
        return difference

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every tensor (name, shape, dtype, bytes) and the configuration.

        A model whose files hold other tensors (quantised, or experts that are joined on loading) is known by those,
        as it is to a machine that only reads the files.
        """
        if self._files is not None and stored_names(self._model, self._files) is None:
            return fingerprint_of_files(self._model, self._files)
        total = hashlib.sha256(hash_config(self._model.config))
        state = sorted(self._model.state_dict().items())
        with ThreadPoolExecutor(4) as pool:  # hashlib releases the interpreter lock
            for digest in pool.map(hash_tensor, *zip(*state)):
                total.update(digest)
        return total.hexdigest()


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.detach()


def head_logits(last_hidden: Tensor, lm_head: Tensor, spec: TargetSpec) -> Tensor:
    """[T, D] and [V, D] to logits [T, V] float32, times the target's logit scale, then soft-capped at its cap."""
    logits = F.linear(last_hidden, lm_head).float()
    if spec.logit_scale != 1.0:
        logits.mul_(spec.logit_scale)
    cap = spec.final_logit_softcap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def refuse_streams(streams: bool, name: str) -> None:
    """Raise InputRefused for a target whose final norm follows a weighing of residual streams."""
    if streams:
        raise InputRefused(
            f"The last hidden state of {name} cannot be made from its last layer's output: several residual streams "
            "are weighed in between. Take it from the target itself, with features.mode=cached or online."
        )


def _check_attention(config: Any, name: str) -> None:
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if unknown:
        raise InputRefused(
            f"{name} ({config.model_type}) has layers of type {', '.join(unknown)}; packed attention knows "
            f"{' and '.join(_LAYER_TYPES)}. Say packed=False for its family in deepspec/targets/families.py."
        )
