"""The parts of a target that training needs when a server computes its hidden states: embedding, LM head, final norm.

The decoder layers are never in memory, so a target of any size can be trained on a machine that could not run it.
D width, V rows of the embedding, T tokens.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from deepspec.config.schema import MISSING, TargetConfig
from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.families import family_of
from deepspec.targets.folder import check_folder
from deepspec.targets.frozen import head_logits, refuse_streams
from deepspec.targets.load import DTYPES, load_tokenizer, locate
from deepspec.targets.options import check_layers, check_mask
from deepspec.targets.quiet import quiet_transformers
from deepspec.targets.spec import TargetSpec, check_parameters, check_shape
from deepspec.targets.tensor_files import TensorFiles, fingerprint_of_files


class TargetHead:
    """Has what FrozenTarget has, but for the passes through the layers. Every method runs without gradients."""

    def __init__(self, folder: Path, skeleton: Any, tokenizer: PreTrainedTokenizerFast, *, dtype: torch.dtype,
                 device: torch.device | str, name: str, feature_layers: Sequence[int] = (),
                 mask_token_id: Optional[int] = None) -> None:
        """``skeleton`` is the causal LM on the meta device. Raises InputRefused for a file without one of the parts."""
        self.name, self.tokenizer, self.dtype, self.device = name, tokenizer, dtype, torch.device(device)
        self.family = family_of(skeleton.config.model_type, name)
        self._skeleton, self._files = skeleton, TensorFiles(folder)
        decoder = skeleton.get_decoder()
        if not isinstance(getattr(decoder, "norm", None), nn.Module):
            raise InputRefused(f"{name} ({skeleton.config.model_type}) has no final norm where one is looked for. "
                               "Use features.mode=cached or online, which run the whole target.")
        tied = skeleton.config.get_text_config().tie_word_embeddings
        self.embed_weight = self._weight(skeleton.get_input_embeddings())  # [V, D]
        self.lm_head_weight = self.embed_weight if tied else self._weight(skeleton.get_output_embeddings())  # [V, D]
        self._norm = self._module(decoder.norm)
        self.final_norm_weight: Optional[Tensor] = getattr(self._norm, "weight", None)
        extra = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.spec = TargetSpec.from_hf_config(
            skeleton.config, vocab_rows=self.embed_weight.shape[0], eos_token_ids=_generation_ends(folder) + extra)
        self.tokenizer_size = min(max(tokenizer.get_vocab().values()) + 1, self.spec.vocab_size)
        self.feature_layers = check_layers(feature_layers, self.spec.num_layers, name, last=self.family.streams)
        self.mask_token_id = check_mask(mask_token_id, self.spec.vocab_size, name)

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, other in self._skeleton.named_modules() if other is module)

    def _weight(self, module: nn.Module) -> Tensor:
        return self._files.read(f"{self._name_of(module)}.weight").to(self.device, self.dtype)

    def _module(self, module: nn.Module) -> nn.Module:
        name = self._name_of(module)
        values = {key: self._files.read(f"{name}.{key}") for key in module.state_dict()}
        real = module.to_empty(device=self.device).to(self.dtype)
        real.load_state_dict(values)
        return real.requires_grad_(False)

    @torch.no_grad()
    def final_norm(self, hidden: Tensor) -> Tensor:
        """The last layer's output [T, D] to the last hidden state [T, D].

        Raises InputRefused where that output is a mean of residual streams, which the model weighs instead.
        """
        refuse_streams(self.family.streams, self.name)
        return self._norm(hidden.to(self.device, self.dtype))

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """Next-token logits [T, V] float32 of ``last_hidden`` [T, D], scaled and soft-capped as the target does it."""
        return head_logits(last_hidden.to(self.device, self.dtype), self.lm_head_weight, self.spec)

    @cached_property
    def fingerprint(self) -> str:
        """FrozenTarget's, read from the files tensor by tensor."""
        return fingerprint_of_files(self._skeleton, self._files)


def _generation_ends(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def load_head(config: TargetConfig, *, device: torch.device | str, cache_dir: Path) -> TargetHead:
    """Embedding, LM head and final norm of the target that ``config`` describes.

    Raises ConfigError for a wrong option and InputRefused for a model that is absent, damaged or of another shape.
    """
    if config.dtype not in DTYPES:
        raise ConfigError(f"target.dtype={config.dtype!r} is not known. Use one of: {', '.join(DTYPES)}.")
    with quiet_transformers():
        folder = locate(config, Path(cache_dir))
        check_folder(folder)
        tokenizer = load_tokenizer(folder, config)
        try:
            options = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(options, dtype=DTYPES[config.dtype],
                                                            trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = (str(error).strip().splitlines() or ["no details"])[0]
            raise InputRefused(f"The target {config.name} in {folder} cannot be read ({type(error).__name__}: {first})."
                               " Download it again, or correct target.path.") from None
    head = TargetHead(folder, skeleton, tokenizer, dtype=DTYPES[config.dtype], device=device, name=config.name,
                      feature_layers=config.feature_layers,
                      mask_token_id=None if config.mask_token_id == MISSING else config.mask_token_id)
    check_shape(head.spec, config.shape)
    check_parameters(skeleton, config.shape, config.name)
    return head
