"""What must be there before hidden states are read or taken from servers, looked at without torch."""

import json
import socket
from pathlib import Path
from typing import Sequence
from urllib.parse import urlsplit

from deepspec import artifacts
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.errors import InputRefused

CONNECT_SECONDS = 0.15
IMPORT = "python -m deepspec.data.features import FORMAT CACHE DIR --target FOLDER"


def check_given_store(config: Config, stages: Sequence[str]) -> None:
    """Raise InputRefused unless features.path is a finished store of the layers of this run."""
    if config.features.path is None or not {"features", "train"} & set(stages):
        return
    directory = paths.features_dir(config)
    manifest = artifacts.read_manifest(directory)
    header = None if manifest is None else manifest.facts.get("header")
    if manifest is None or manifest.producer != "features" or not isinstance(header, dict):
        raise InputRefused(f"features.path={config.features.path!r} is not a feature store. A cache of DeepSpec, "
                           f"SpecForge or speculators becomes one with: {IMPORT}")
    if manifest.status != "complete":
        raise InputRefused(f"features.path={config.features.path!r} is unfinished. Run again what was making it.")
    width, own = header.get("hidden_size"), config.target.shape.hidden_size
    if width != own:  # no features.allow helps: the drafter has the width of this target
        raise InputRefused(f"features.path={config.features.path!r} has hidden states of width {width}, but target "
                           f"{config.target.name!r} has {own}. Choose the target the store was made of.")
    found, wanted = header.get("layers"), list(config.target.feature_layers)
    if found != wanted:
        raise InputRefused(f"features.path={config.features.path!r} has hidden states of layers {found}, but "
                           f"target.feature_layers={wanted}. Set target.feature_layers={found}, or give another store.")


def check_given_prompts(config: Config, stages: Sequence[str]) -> None:
    """Raise InputRefused when held-out prompts are to be decoded as text and there are only token ids of them."""
    directory = paths.responses_dir(config)
    if config.features.path is None or "evaluate" not in stages or directory.name != paths.GIVEN_RESPONSES:
        return
    if any(benchmark.path == "held_out" for benchmark in config.evaluate.benchmarks):
        raise InputRefused(f"evaluate.benchmarks has held_out, but {directory} has only token ids of the held-out "
                           "samples, no conversations. Give files as benchmarks (benchmark=paper, or "
                           "evaluate.benchmarks), or make prompts and responses of your own by adding these stages.")


def check_hidden_state_servers(config: Config, stages: Sequence[str]) -> None:
    """Raise InputRefused when no server of hidden states answers and this run would ask one."""
    server = config.features.server
    asked = "features" in stages if server.store else "train" in stages
    if config.features.mode != "server" or not asked or (server.store and _stored(config)):
        return
    if server.files is not None and not Path(server.files).expanduser().is_dir():
        raise InputRefused(f"features.server.files={server.files!r} is not a folder here. Give the folder in which the "
                           "server leaves its files (shared_storage_path) under its name on this machine, or null if "
                           "both names are the same.")
    for key, urls in (("servers", server.servers), ("last_servers", server.last_servers)):
        failures = [failure for url in urls if (failure := connect_failure(url)) is not None]
        if urls and len(failures) == len(urls):
            raise InputRefused(f"No server of features.server.{key} answers: {'; '.join(failures)}. Start one, for "
                               f"example: {serve_command(config, last=key == 'last_servers')} -- or use features=cached"
                               " or features=online.")


def serve_command(config: Config, *, last: bool = False) -> str:
    """How a server of the hidden states of this run is started; ``last``: of the last hidden state alone."""
    layers, target = list(config.target.feature_layers), config.target.path or config.target.name
    if config.features.server.engine == "sglang":
        what = "--enable-return-hidden-states" if last else (
            "--enable-return-aux-hidden-states --speculative-algorithm DFLASH --return-aux-hidden-state-layer-ids "
            + " ".join(map(str, layers)))
        return (f"python -m sglang.launch_server --model-path {target} {what} --disable-radix-cache "
                "--chunked-prefill-size -1")
    ids = [layer + 1 for layer in layers] + [config.target.shape.num_layers]
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}}}
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": config.features.server.files or "FOLDER"}}
    return (f"vllm serve {target} --speculative-config '{json.dumps(speculative)}' "
            f"--kv-transfer-config '{json.dumps(transfer)}'")


def _stored(config: Config) -> bool:
    manifest = artifacts.read_manifest(paths.features_dir(config))
    return manifest is not None and manifest.status == "complete"


def connect_failure(url: str) -> str | None:
    """Why there is no server at ``url``, None if there is one."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_SECONDS):
            return None
    except (OSError, ValueError) as error:
        return f"{url} ({error})"
