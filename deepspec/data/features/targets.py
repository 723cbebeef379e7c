"""The target of a store or of an imported cache, from a folder."""

import tempfile
from pathlib import Path
from typing import Any, Sequence

from deepspec import distributed
from deepspec.config.schema import TargetConfig
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target


def load_for_features(options: dict[str, Any], layers: Sequence[int], cache_dir: Path) -> FrozenTarget:
    """``options`` are fields of TargetConfig. Nothing is rendered here, so any chat template does."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "unused.jinja"
        template.write_text("{{ messages }}", encoding="utf-8")
        config = TargetConfig(**(options | {"feature_layers": list(layers), "chat_template": str(template)}))
        return load_target(config, device=distributed.device(), cache_dir=cache_dir)


def load_folder(path: str, dtype: str, layers: Sequence[int]) -> FrozenTarget:
    """A model's folder, or a hub id that is in the local cache."""
    options = {"name": Path(path).name, "source": "hf", "path": path, "dtype": dtype}
    return load_for_features(options, layers, Path(path))
