"""From a target's configuration to a ``FrozenTarget``: find the folder, check it, load it, prove that it is whole."""

import logging
from pathlib import Path
from typing import Any, Optional

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from deepspec.config.paths import target_folder
from deepspec.config.schema import MISSING, TargetConfig
from deepspec.errors import ConfigError, InputRefused
from deepspec.targets.folder import check_folder
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.gguf import ensure_gguf
from deepspec.targets.micro import ensure_micro
from deepspec.targets.quiet import quiet_transformers
from deepspec.targets.spec import check_parameters, check_shape
from deepspec.targets.tensor_files import TensorFiles

_log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py")


def load_target(config: TargetConfig, *, device: torch.device | str, cache_dir: Path,
                features: bool = True) -> FrozenTarget:
    """Load the target that ``config`` describes onto ``device``, frozen and checked.

    ``cache_dir`` keeps what is converted or trained here once. ``features=False`` leaves ``config.feature_layers``
    unread, for stages that only generate. Raises ConfigError for a wrong option and InputRefused for a model that is
    absent, damaged, of another shape than ``config.shape``, or of an architecture whose logits we do not reproduce.
    """
    if config.dtype not in DTYPES:
        raise ConfigError(f"target.dtype={config.dtype!r} is not known. Use one of: {', '.join(DTYPES)}.")
    with quiet_transformers():
        folder = locate(config, Path(cache_dir))
        check_folder(folder)
        tokenizer = load_tokenizer(folder, config)
        model = _load_model(folder, config)
    model.to(torch.device(device))  # type: ignore[arg-type]  # transformers hides the signature behind a wrapper
    target = FrozenTarget(
        model, tokenizer, feature_layers=config.feature_layers if features else (), name=config.name,
        mask_token_id=None if config.mask_token_id == MISSING else config.mask_token_id, files=TensorFiles(folder))
    check_shape(target.spec, config.shape)
    check_parameters(model, config.shape, config.name)
    target.self_check()
    return target


def locate(config: TargetConfig, cache_dir: Path) -> Path:
    """The folder with the target's weights, downloading, converting or training it first where needed."""
    if config.source == "micro":
        return ensure_micro(cache_dir)
    if config.source == "gguf_package":
        return ensure_gguf(config.path, cache_dir)
    if config.source != "hf":
        raise ConfigError(f"target.source={config.source!r} is not known. Use one of: hf, gguf_package, micro.")
    return target_folder(config) or _download(config.path, config.revision)


def _download(repository: str, revision: Optional[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        where = f"{repository} (revision {revision or 'main'})"
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
        raise InputRefused(
            f"The target {where} is not in the local hub cache and could not be downloaded [{reason}]. Check the name, "
            "the network and your hub login, or set target.path to a folder that holds the model."
        ) from None


def load_tokenizer(folder: Path, config: TargetConfig) -> PreTrainedTokenizerFast:
    """The target's tokenizer with a chat template: its own, or the file that ``config.chat_template`` names.

    Raises ConfigError naming the option when there is no template.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make up an empty one
        raise InputRefused(f"The tokenizer of {config.name} is missing: {folder} has no tokenizer.json. Copy the "
                           "model's tokenizer files into that folder.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputRefused(f"The tokenizer of {config.name} in {folder} cannot be loaded ({_first_line(error)}). Copy "
                           "its tokenizer files into that folder.") from None
    if not tokenizer.is_fast:
        raise InputRefused(f"The tokenizer of {config.name} has no fast version (tokenizer.json). Save one into "
                           f"{folder}.")
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        if not path.is_file():
            raise ConfigError(f"target.chat_template={config.chat_template} is not a file. Give the path of a Jinja "
                              "template, or null to use the tokenizer's own.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ConfigError(f"The tokenizer of {config.name} ({folder}) has no chat template, so conversations cannot be "
                          "rendered. Set target.chat_template to a file with the Jinja template the target was trained "
                          "with.")
    return tokenizer


def _load_model(folder: Path, config: TargetConfig) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[config.dtype], trust_remote_code=config.trust_remote_code, local_files_only=True,
            use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise InputRefused(f"The target {config.name} in {folder} cannot be loaded: {_first_line(error)}. Download it "
                           "again, or correct target.path.") from None
    model, report = loaded
    check_report(report, folder, config.name)
    if model.config.get_text_config().tie_word_embeddings:
        head, embed = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if head.data_ptr() != embed.data_ptr() and not torch.equal(head, embed):
            raise InputRefused(f"{config.name} in {folder} ties its LM head to its embedding (tie_word_embeddings), "
                               "but the two differ after loading. Correct tie_word_embeddings in its config.json.")
    return model


def check_report(report: dict[str, Any], folder: Path, name: str) -> None:
    """A tensor the files lack would have been initialised at random: refuse, naming it."""
    missing = sorted(report.get("missing_keys", ()))
    mismatched = sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing or mismatched:
        what = "has no weights for" if missing else "has weights of another shape for"
        listed = ", ".join((missing or mismatched)[:5])
        raise InputRefused(f"{folder} {what} {len(missing or mismatched)} tensors of {name}, among them {listed}. They "
                           "would be random. Download the model again, or correct its config.json.")
    if report.get("unexpected_keys"):
        _log.info("%s: %d tensors of the files are not used", name, len(report["unexpected_keys"]))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
