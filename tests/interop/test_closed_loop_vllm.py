"""The closed loop whole, with real vLLM on the CPU: the engine records its own confidences, the loop measures drift on
them, trains on logged requests, exports, serves the successor in vLLM, lets the doctor look and compares.

Needs DEEPSPEC_VLLM_PYTHON and DEEPSPEC_RUN, the directory of a finished run of ``+experiment=tiny``.
"""

import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import SCRIPT, free_port
from test_vllm import PYTHON, serve, speculative_config

from deepspec.artifacts import read_manifest
from deepspec.config.compose import compose_config
from deepspec.config.paths import model_cache, responses_dir
from deepspec.data.responses import read_responses
from deepspec.targets.load import locate
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


def accepted_of(drafts: list[int], following: list[int]) -> int:
    """A residual token is never the rejected one, so what agrees was accepted, at any temperature."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, following)))


def engine_records(path: Path, report: dict[str, Any], header: dict[str, Any]) -> int:
    """What the engine drafted, said of it, and kept, as records of service; returns the number of blocks."""
    rows: list[dict[str, Any]] = []
    for number, tokens in enumerate(report["tokens"]):
        place = 0
        for drafts, confidences in zip(report["drafts"][number], report["confidences"][number]):
            following = tokens[place + 1:]
            if len(following) < len(drafts):
                break
            accepted = accepted_of(drafts, following)
            logits = [math.log(value / (1 - value)) for value in confidences]
            rows.append({"conversation": str(number), "domain": "service", "logits": logits, "accepted": accepted})
            place += accepted + 1
    lines = [{"format": "deepspec-confidence-records", **header}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(rows)


def test_once_round(tmp_path: Path) -> None:
    config = compose_config(["+experiment=tiny"])
    rows = list(read_responses(responses_dir(config)))
    run = tmp_path / "now"
    shutil.copytree(str(RUN), run)
    (run / "overrides.json").write_text(json.dumps(["+experiment=tiny"]))
    target = str(locate(config.target, model_cache(config)).resolve())
    told = speculative_config(run / "export")
    report = serve({
        "target": target, "prompts": [list(row.turns[0].prompt_ids) for row in rows[:PROMPTS]], "max_tokens": TOKENS,
        "temperature": 1.0, "speculative_config": told, "max_model_len": 512, "record": True, "confidence": True,
    }, timeout=1200)
    blocks = engine_records(tmp_path / "service.jsonl", report, {
        "block_length": told["num_speculative_tokens"], "sampling_temperature": 1.0,
        "drafter_sha256": read_manifest(run / "export").inputs["drafter"]})
    assert blocks > 50
    requests = [{"body": {"model": "m", "messages": list(row.messages[:1])}} for row in rows[-REQUESTS:]]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in requests))
    port = free_port()
    starter = tmp_path / "serve.sh"
    starter.write_text(
        f"exec env DEEPSPEC_VLLM_RUNNER=2 OMP_NUM_THREADS=1 {PYTHON} {SCRIPT} {target} --port {port} --dtype float32 "
        "--max-model-len 512 --max-num-seqs 4 --enforce-eager --speculative-config "
        "'{\"method\": \"dspark\", \"model\": \"'\"$1\"'\", \"num_speculative_tokens\": '$2'}'\n")
    done = script(
        "closed_loop", f"run.dir={run}", f"run.data_root={config.run.data_root}", f"records={tmp_path}/service.jsonl",
        f"requests={tmp_path}/requests.jsonl", "action=train", "steps=8", f"endpoint=http://127.0.0.1:{port}",
        f"serve='bash {starter} {{drafter}} {{tokens}}'", "doctor.max_prompts=4", "doctor.max_new_tokens=24", *SMALL,
        timeout=1500)
    sys.stderr.write(done.stdout[-3000:] + done.stderr[-3000:])
    assert done.returncode == 0
    found = json.loads((tmp_path / "now-next" / "loop.json").read_text())
    assert found["action"] == "train" and found["drift"]["blocks"] == blocks
    assert found["doctor"]["healthy"] and found["doctor"]["server"]["engine"] == "vllm"
    assert found["comparison"]["acceptance"]["prompts"] >= 6 and found["comparison"]["speedup"] > 0
    assert (tmp_path / "now-next" / "export" / "config.json").is_file()
