"""The first layers of a target, enough to tell which layer somebody else's hidden states are of. T tokens, D width."""

import logging
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from deepspec.config.schema import TargetConfig
from deepspec.errors import UserError
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import DTYPES, check_report, load_tokenizer, locate
from deepspec.targets.quiet import quiet_transformers

log = logging.getLogger(__name__)
MOST_LAYERS = 8  # beyond that it would be a good part of the target
TOKENS = 64  # of a sample that are looked at; what comes before a token does not depend on what follows


class FirstLayers:
    """Layers around the first feature layer, loaded when they are first needed."""

    def __init__(self, config: TargetConfig, cache_dir: Path, num_layers: int) -> None:
        self._config, self._cache_dir, self._num_layers = config, cache_dir, num_layers
        self._wanted = int(config.feature_layers[0])
        self._target: Optional[FrozenTarget] = None
        self._tried = False

    def layer_of(self, input_ids: Tensor, states: Tensor) -> Optional[str]:
        """What ``states`` [T, D], taken for the first feature layer of ``input_ids`` [T], really are: None if that, or
        if it cannot be told.

        The nearest of the embedding and the layers around is meant, so it does not matter by how much a quantised
        target differs.
        """
        target = self._load()
        if target is None:
            return None
        ids = input_ids[:TOKENS]
        own = target.encode(ids, [len(ids)]).features.split(target.spec.hidden_size, dim=1)
        found = dict(zip((f"layer {layer}" for layer in target.feature_layers), own))
        if self._wanted == 0:
            found = {"the embedding": target.embed_weight[ids] * target.spec.embed_scale} | found
        theirs = states[:TOKENS].to(target.device, torch.float32)
        errors = {name: float((theirs - values.float()).norm()) for name, values in found.items()}
        nearest = min(errors, key=lambda name: errors[name])
        return None if nearest == f"layer {self._wanted}" else nearest

    def _load(self) -> Optional[FrozenTarget]:
        if not self._tried:
            self._tried = True
            self._target = self._first_layers()
        return self._target

    def _first_layers(self) -> Optional[FrozenTarget]:
        count = min(self._wanted + 3, self._num_layers)
        if count > MOST_LAYERS:
            log.warning("features: whether layer %d of the servers is layer %d of %s is not checked: it would take %d "
                        "layers of it", self._wanted, self._wanted, self._config.name, count)
            return None
        try:
            return _truncated(self._config, self._cache_dir, count, self._wanted)
        except (UserError, OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            first = (str(error).strip().splitlines() or [""])[0]
            log.warning("features: whether layer %d of the servers is layer %d of %s is not checked: its first layers "
                        "cannot be loaded here (%s: %s)", self._wanted, self._wanted, self._config.name,
                        type(error).__name__, first)
            return None


def _cut(text: Any, count: int) -> int:
    """Make a configuration describe its first ``count`` layers, or a few more, so that the last is of the same kind.

    Gemma 4 takes a last layer of another kind for one that is written wrongly. Returns the number of layers.
    """
    total, kinds = text.num_hidden_layers, list(getattr(text, "layer_types", None) or ())
    while kinds and count < total and kinds[count - 1] != kinds[-1]:
        count += 1
    if count > MOST_LAYERS:
        raise ValueError(f"it would take {count} layers of it")
    if count < total:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == total:
                setattr(text, name, value[:count])
        if getattr(text, "num_kv_shared_layers", 0):
            text.num_kv_shared_layers = max(0, count - total + text.num_kv_shared_layers)
        text.num_hidden_layers = count
    return count


def _truncated(config: TargetConfig, cache_dir: Path, count: int, wanted: int) -> FrozenTarget:
    """The target's first ``count`` layers with hooks on those around ``wanted`` that engines can capture."""
    with quiet_transformers():
        folder = locate(config, cache_dir)
        options: Any = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
        count = _cut(options.get_text_config(), count)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=options, dtype=DTYPES[config.dtype], trust_remote_code=config.trust_remote_code,
            local_files_only=True, use_safetensors=True, output_loading_info=True)
        model, report = loaded
        check_report(report | {"unexpected_keys": ()}, folder, config.name)  # the other layers are not wanted here
        tokenizer = load_tokenizer(folder, config)
    around = [layer for layer in (wanted - 1, wanted, wanted + 1) if 0 <= layer < count - 1]
    return FrozenTarget(model, tokenizer, feature_layers=around, name=config.name)
