"""Where things lie on disk. Data directories are named by the hash of what made them, so runs share them safely."""

from dataclasses import asdict
from pathlib import Path
from typing import Optional

from deepspec.artifacts import canonical_hash, sha256_file
from deepspec.config.schema import Config, TargetConfig
from deepspec.errors import ConfigError

GIVEN_RESPONSES = "responses"  # folder in an imported store


def target_identity(target: TargetConfig) -> dict[str, object]:
    """The options that choose the target's weights and how its text is rendered."""
    keys = ("name", "source", "path", "revision", "dtype", "chat_template", "thinking")
    values = {key: getattr(target, key) for key in keys}
    if target.chat_template is not None:
        template = Path(target.chat_template).expanduser()
        # By content: an edited template renders other text, a moved one does not.
        values["chat_template"] = sha256_file(template) if template.is_file() else target.chat_template
    return values


def prompts_key(config: Config) -> dict[str, object]:
    """What decides the prompts."""
    data = asdict(config.data)
    data["sources"] = [{name: value for name, value in source.items() if name != "prompt_column" or value}
                       for source in data["sources"]]
    names = ["sources", "max_prompts", "held_out_fraction", "min_held_out"]
    # What is off is left out, so that data of before the option keep their place. The benchmarks of an evaluation are
    # no part of it: the stage itself looks whether the prompts there are free of them.
    names += [name for name in ("redaction", "near_duplicate_threshold", "decontaminate") if data[name]]
    if data["near_duplicate_threshold"]:
        names.append("near_duplicate_num_perm")
    if data["decontaminate"]:
        names.append("decontaminate_ngram")
    return {"data": {name: data[name] for name in names}, "seed": config.run.seed}


def responses_key(config: Config) -> dict[str, object]:
    """What decides the responses: prompts, target, sampling. Where they are computed does not."""
    responses = asdict(config.responses)
    names = ["max_tokens", "temperature", "top_p", "top_k", "truncated"]
    names += ["thinking_share"] if config.responses.thinking_share is not None else []
    return {
        "prompts": prompts_key(config), "target": target_identity(config.target),
        "responses": {name: responses[name] for name in names}, "max_length": config.data.max_length,
    }


def features_key(config: Config) -> dict[str, object]:
    """What decides the features: responses, layers, storage format, and the engine where one computes them."""
    features, layers = config.features, list(config.target.feature_layers)
    if features.path is not None:  # what is in it is compared by content
        return {"given": True, "layers": layers, "held_out_fraction": features.held_out_fraction}
    key: dict[str, object] = {"responses": responses_key(config), "layers": layers, "codec": features.codec}
    if features.mode == "server":
        server = features.server
        key["served"] = {"engine": server.engine, "model": server.model, "quantization": server.quantization}
    return key


def makes_store(config: Config) -> bool:
    """Whether stage features writes a store."""
    return (config.features.mode == "cached" and config.features.path is None) or (
        config.features.mode == "server" and config.features.server.store)


def leaves_store(config: Config) -> bool:
    """Whether this run needs disk for a store."""
    return makes_store(config) or config.features.mode == "hybrid"


def reads_store(config: Config) -> bool:
    """Whether training reads a store that is finished before it begins."""
    return makes_store(config) or config.features.path is not None


def _directory(config: Config, kind: str, key: dict[str, object]) -> Path:
    return Path(config.run.data_root) / config.target.name / f"{kind}-{canonical_hash(key, 12)}"


def prompts_dir(config: Config) -> Path:
    """Directory of prompts.jsonl."""
    return _directory(config, "prompts", prompts_key(config))


def responses_dir(config: Config) -> Path:
    """Directory of responses.jsonl. A store that was given brings held-out ones along, unless this run makes some."""
    if config.features.path is not None and "responses" not in config.stages:
        given = features_dir(config) / GIVEN_RESPONSES
        if given.is_dir():
            return given
    return _directory(config, "responses", responses_key(config))


def features_dir(config: Config) -> Path:
    """Directory of the feature store."""
    if config.features.path is not None:
        return Path(config.features.path).expanduser()
    return _directory(config, "features", features_key(config))


def model_cache(config: Config) -> Path:
    """Targets that are converted or trained here (GGUF package, micro target)."""
    return Path(config.run.data_root) / "targets"


def run_dir(config: Config) -> Path:
    """Directory of this run."""
    return Path(config.run.dir)


def target_folder(config: TargetConfig) -> Optional[Path]:
    """``target.path`` of a target of ``hf`` as a folder, None where it is a repository of the hub.

    Raises ConfigError for a folder that is not there.
    """
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        if config.revision is not None:
            raise ConfigError(f"target.revision={config.revision!r} is for hub repositories, but target.path="
                              f"{config.path} is a folder. Set target.revision=null.")
        return folder
    if folder.is_absolute() or config.path.startswith((".", "~")) or config.path.count("/") > 1:
        raise ConfigError(f"target.path={config.path} is not a folder on this machine. Correct the path, or give the "
                          "id of a hub repository (owner/name).")
    return None


def served_folder(config: Config) -> Path:
    """The folder that a server is said to serve: ``doctor.drafter``, or the run's export."""
    return Path(config.doctor.drafter or run_dir(config) / "export").expanduser()
