"""Features from real vLLM on the CPU: ``extract_hidden_states`` over HTTP, through files, into our store.

Needs DEEPSPEC_VLLM_PYTHON. Only the copy of the states out of the engine's memory is replaced (cpu_hidden_states.py):
vLLM's own uses CUDA streams.
"""

import json
import os
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import pytest
import torch
from random_export import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MASK, VOCABULARY, save_target

from deepspec import artifacts
from deepspec.config import paths
from deepspec.config.schema import Config, DataConfig, TargetConfig, TargetShape
from deepspec.data.engines.vllm_hidden import engine_layers
from deepspec.data.feature_store import FeatureStore
from deepspec.distributed import free_port
from deepspec.errors import InputRefused
from deepspec.stages import features

PYTHON = os.environ.get("DEEPSPEC_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to ask")
OURS = [1, 2, 4]


def start(folder: Path, files: Path, port: int, layers: list[int]) -> subprocess.Popen[bytes]:
    """The server in a process of its own; its words go to a file beside the target."""
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                   "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}}
    transfer = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_hidden_states",
                "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": str(files)}}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(Path(__file__).parent), "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny",
         "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs",
         "4", "--enforce-eager", "--speculative-config", json.dumps(speculative), "--kv-transfer-config",
         json.dumps(transfer)], env=environment, stdout=open(folder / "server.log", "wb"), stderr=subprocess.STDOUT)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, str]]:
    """(target folder, folder of the files, base URL)."""
    root = tmp_path_factory.mktemp("served")
    folder, files, port = save_target(root / "target"), root / "files", free_port()
    process = start(folder, files, port, engine_layers(OURS, LAYERS))
    try:
        until = time.monotonic() + 400
        while not answers(port):
            assert process.poll() is None and time.monotonic() < until, (folder / "server.log").read_text()[-4000:]
            time.sleep(1)
        yield folder, files, f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture()
def config(served: tuple[Path, Path, str], tmp_path: Path) -> Config:
    """Conversations of 12 to 100 tokens, several with one beginning, so that the engine's prefix cache has hits."""
    folder, _, url = served
    config = Config(
        target=TargetConfig(name="tiny", path=str(folder), dtype="float32", feature_layers=OURS, mask_token_id=MASK,
                            shape=TargetShape("qwen3", HIDDEN, 256, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY)),
        data=DataConfig(max_length=128))
    config.run.name, config.run.data_root = "test", str(tmp_path / "data")
    config.features = replace(config.features, codec="fp32", shard_megabytes=1)
    config.features.server = replace(config.features.server, servers=[url], logprob_tolerance=1e-3)
    directory = paths.responses_dir(config)
    manifest = artifacts.begin(directory, "responses", "fingerprint")
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 980, (40,), generator=generator).tolist()
    with open(directory / "responses.jsonl", "w", encoding="utf-8") as handle:
        for index in range(16):
            own = torch.randint(3, 980, (12 + 3 * index,), generator=generator).tolist()
            ids = (shared if index % 2 else []) + own
            turn = {"prompt_ids": ids[:6], "response_ids": ids[6:], "finish_reason": "stop", "text": ""}
            handle.write(json.dumps({"id": f"p{index}", "domain": "chat", "messages": [], "turns": [turn],
                                     "split": "train" if index < 12 else "held_out"}) + "\n")
    artifacts.complete(directory, manifest, ["responses.jsonl"])
    return config


def test_the_engines_hidden_states_are_the_targets(config: Config, served: tuple[Path, Path, str]) -> None:
    features.run(config)
    asked = replace(config, features=replace(config.features, mode="server"))
    features.run(asked)
    ours, theirs = (FeatureStore(paths.features_dir(one)) for one in (config, asked))
    assert [record.sample_id for record in ours.records] == [record.sample_id for record in theirs.records]
    assert len(ours) == 16
    for index in range(len(ours)):
        left, right = ours.read(index), theirs.read(index)
        assert torch.equal(left.sample.input_ids, right.sample.input_ids)
        torch.testing.assert_close(right.features, left.features, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(right.last_hidden, left.last_hidden, atol=2e-5, rtol=1e-4)
    facts = artifacts.read_manifest(paths.features_dir(asked)).facts
    assert facts["served"]["engine_version"].startswith("0.") and facts["served"]["model_root"] == str(served[0])
    assert facts["quarantined"] == []
    assert os.listdir(served[1]) == []  # read and deleted, locks too


def test_layers_of_another_count_are_refused(config: Config) -> None:
    config.features.mode, config.target.feature_layers = "server", [1, 4]
    with pytest.raises(InputRefused, match=r"eagle_aux_hidden_state_layer_ids must be \[2, 5, 6\] there"):
        features.run(replace(config, features=replace(config.features, mode="server")))
