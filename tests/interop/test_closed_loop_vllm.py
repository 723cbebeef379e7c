"""The closed loop whole, with real vLLM on the CPU: the engine records its own confidences, the loop measures drift on
them, trains on logged requests or calibrates again, exports, serves the successor in vLLM, lets the doctor look and
compares.

Needs DEEPSPEC_VLLM_PYTHON and DEEPSPEC_RUN, the directory of a finished run of ``+experiment=tiny``.
"""

import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from comparison import recorded_rounds, worst_confidence
from serving import SCRIPT, free_port
from test_vllm import PYTHON, serve, speculative_config

from deepspec.artifacts import read_manifest
from deepspec.config.compose import compose_config
from deepspec.config.paths import model_cache, responses_dir
from deepspec.data.responses import read_responses
from deepspec.targets.load import load_target, locate
from tests.conftest import script

RUN = os.environ.get("DEEPSPEC_RUN")
pytestmark = pytest.mark.skipif(
    not PYTHON or not RUN, reason="needs DEEPSPEC_VLLM_PYTHON and DEEPSPEC_RUN (a finished run of +experiment=tiny)")
PROMPTS, TOKENS, REQUESTS = 6, 40, 60
SMALL = (
    "evaluate.modes=[fixed]", "evaluate.max_new_tokens=16", "evaluate.bootstrap=100", "evaluate.check_greedy=0",
    "evaluate.baseline_untrained=false", "confidence.max_new_tokens=24", "confidence.max_blocks=600",
    "calibration.bootstrap=20", "profile.num_reqs=[1,4]", "profile.verify_lengths=[0,3]", "profile.seconds_limit=4",
    "data.min_held_out=6", "tracking.mode=disabled")


def engine_records(path: Path, report: dict[str, Any], header: dict[str, Any]) -> int:
    """What the engine drafted, said of it, and kept, as records of service; returns the number of blocks."""
    rows: list[dict[str, Any]] = []
    for number, tokens in enumerate(report["tokens"]):
        for drafted in recorded_rounds(report, number):
            if drafted.place + len(drafted.drafts) >= len(tokens):
                break  # not every draft was judged
            logits = [math.log(value / (1 - value)) for value in report["confidences"][number][drafted.number]]
            rows.append({"conversation": str(number), "domain": "service", "logits": logits,
                         "accepted": drafted.accepted})
    lines = [{"format": "deepspec-confidence-records", **header}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(rows)


@dataclass(frozen=True)
class Service:
    """A run whose drafter is in service, what the engine recorded there, and the command that serves a successor."""

    run: Path
    target: str
    rows: list[Any]
    prompts: list[list[int]]
    blocks: int
    overrides: tuple[str, ...]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = tmp_path_factory.mktemp("loop")
    config = compose_config(["+experiment=tiny"])
    rows = list(read_responses(responses_dir(config)))
    run = folder / "now"
    shutil.copytree(str(RUN), run)
    (run / "overrides.json").write_text(json.dumps(["+experiment=tiny", "run.name=now"]))
    target = str(locate(config.target, model_cache(config)).resolve())
    prompts = [list(row.turns[0].prompt_ids) for row in rows[:PROMPTS]]
    told = speculative_config(run / "export")
    report = serve({
        "target": target, "prompts": prompts, "max_tokens": TOKENS, "temperature": 1.0, "speculative_config": told,
        "max_model_len": 512, "record": True, "confidence": True})
    blocks = engine_records(folder / "service.jsonl", report, {
        "block_length": told["num_speculative_tokens"], "sampling_temperature": 1.0,
        "drafter_sha256": read_manifest(run / "export").inputs["drafter"]})
    port = free_port()
    starter = folder / "serve.sh"
    starter.write_text(
        f"exec env DEEPSPEC_VLLM_RUNNER=2 OMP_NUM_THREADS=1 {PYTHON} {SCRIPT} {target} --port {port} --dtype float32 "
        "--max-model-len 512 --max-num-seqs 4 --enforce-eager --speculative-config "
        "'{\"method\": \"dspark\", \"model\": \"'\"$1\"'\", \"num_speculative_tokens\": '$2'}'\n")
    return Service(run, target, rows, prompts, blocks, (
        f"run.dir={run}", f"run.data_root={config.run.data_root}", f"records={folder}/service.jsonl",
        f"endpoint=http://127.0.0.1:{port}", f"serve='bash {starter} {{drafter}} {{tokens}}'", "doctor.max_prompts=4",
        "doctor.max_new_tokens=24", *SMALL))


def test_once_round(service: Service, tmp_path: Path) -> None:
    """Fine-tuning on logged requests, and the successor against the drafter in service."""
    assert service.blocks > 50
    requests = [{"body": {"model": "m", "messages": list(row.messages[:1])}} for row in service.rows[-REQUESTS:]]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in requests))
    done = script("closed_loop", *service.overrides, f"requests={tmp_path}/requests.jsonl", "action=train", "steps=8",
                  timeout=1800)
    sys.stderr.write(done.stdout[-3000:] + done.stderr[-3000:])
    assert done.returncode == 0
    found = json.loads((service.run.parent / "now-next" / "loop.json").read_text())
    assert found["action"] == "train" and found["drift"]["blocks"] == service.blocks
    assert found["doctor"]["healthy"] and found["doctor"]["server"]["engine"] == "vllm"
    assert found["comparison"]["acceptance"]["prompts"] >= 6 and found["comparison"]["speedup"] > 0
    assert (service.run.parent / "now-next" / "export" / "config.json").is_file()


def test_recalibrated_in_the_weights(service: Service) -> None:
    """Another calibration on the engine's own records, folded into the head: the doctor finds the served folder to be
    the run's, and what the engine then says of its drafts is what our folded head says."""
    same = [text for text in service.overrides if not text.startswith("data.min_held_out")]  # the doctor's prompts
    done = script("closed_loop", *same, "action=recalibrate", "export.fold_calibration=true", "export.dtype=float32",
                  "calibration.min_samples=10", timeout=1800)
    sys.stderr.write(done.stdout[-3000:] + done.stderr[-3000:])
    assert done.returncode == 0
    found = json.loads((service.run / "loop.json").read_text())
    assert found["action"] == "recalibrate" and found["ece"]["before"] > 0
    assert found["doctor"]["healthy"]
    assert "confidence_head" not in {item["cause"] for item in found["doctor"]["findings"]}
    export = service.run / "export"
    fold = json.loads((export / "config.json").read_text())["deepspec_confidence_fold"]
    assert (fold["temperature"], fold["shift"]) != (1.0, 0.0)
    config = compose_config(["+experiment=tiny"])
    target = load_target(config.target, device="cpu", cache_dir=model_cache(config))
    report = serve({
        "target": service.target, "prompts": service.prompts[:1], "max_tokens": TOKENS, "max_model_len": 512,
        "speculative_config": speculative_config(export), "record": True, "confidence": True})
    worst, compared = worst_confidence(target, export, service.prompts[0], report)
    print(f"folded by {fold}: largest difference of {compared} rounds' confidences {worst:.2g}")
    assert compared >= 5 and worst <= 1e-6
