"""Exports served by real vLLM on the CPU. Needs DEEPSPEC_VLLM_PYTHON: the Python of an environment with vLLM."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from comparison import assert_drafts_are_ours
from random_export import export_random, save_target

PYTHON = os.environ.get("DEEPSPEC_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
RUNNER = Path(__file__).with_name("vllm_acceptance.py")
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {}, "dspark-bonus-anchor": {"sample_from_anchor": False},
    "dflash-anchor": {"algorithm": "dflash", "head": "none", "confidence_head": False},
    "dflash-1+N": {"algorithm": "dflash", "head": "none", "confidence_head": False, "sample_from_anchor": False},
}
PROMPTS = [[5, 77, 140, 9, 300], [12, 13, 14, 15, 16, 17, 400, 401]]


def serve_all(jobs: list[dict[str, Any]], timeout: int = 1800) -> list[dict[str, Any]]:
    """Run one engine after another in a process and environment of their own; their reports."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([str(PYTHON), str(RUNNER)], input=json.dumps(jobs), capture_output=True, text=True,
                          timeout=timeout, env=environment | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def serve(job: dict[str, Any], timeout: int = 1800) -> dict[str, Any]:
    """The report of a single engine."""
    return serve_all([job], timeout)[0]


def speculative_config(export: Path) -> dict[str, Any]:
    told = json.loads((export / "serving" / "vllm_speculative_config.json").read_text())
    return told | {"model": str(export)}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_served_output_is_the_targets_own(target_folder: Path, tmp_path: Path, drafter: dict[str, Any]) -> None:
    export = export_random(target_folder, tmp_path, **drafter)
    report = serve({"target": str(target_folder), "speculative_config": speculative_config(export), "prompts": PROMPTS,
                    "max_tokens": 24, "alone": True})
    assert report["greedy_equal"], report
    expected = 4 if drafter.get("sample_from_anchor", True) else 3
    assert report["drafted"] == expected * report["rounds"] > 0


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_every_draft_is_ours(target_folder: Path, tmp_path: Path, drafter: dict[str, Any]) -> None:
    """The engine's drafts, token for token: slots, positions, layer ids, masks and heads are all as trained."""
    export = export_random(target_folder, tmp_path, **drafter)
    report = serve({"target": str(target_folder), "speculative_config": speculative_config(export),
                    "prompts": PROMPTS[:1], "max_tokens": 24, "record": True})
    assert_drafts_are_ours(target_folder, export, PROMPTS[0], report)


def test_sampled_drafts_and_targets(target_folder: Path, tmp_path: Path) -> None:
    """``draft_sample_method: probabilistic`` as the export writes it, at temperature 1."""
    export = export_random(target_folder, tmp_path)
    told = speculative_config(export)
    assert told["draft_sample_method"] == "probabilistic"
    report = serve({"target": str(target_folder), "speculative_config": told, "prompts": PROMPTS, "max_tokens": 16,
                    "temperature": 1.0})
    assert report["drafted"] == 4 * report["rounds"] > 0 and [len(ids) for ids in report["tokens"]] == [16, 16]


def test_tied_target(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target", tied=True)
    export = export_random(folder, tmp_path / "run")
    report = serve({"target": str(folder), "speculative_config": speculative_config(export), "prompts": PROMPTS,
                    "max_tokens": 16, "alone": True})
    assert report["greedy_equal"] and report["rounds"] > 0


def test_speculators_layout(target_folder: Path, tmp_path: Path) -> None:
    export = export_random(target_folder, tmp_path, formats=("deepspec", "speculators"))
    told = speculative_config(export) | {"model": str(export / "speculators")}
    native = serve({"target": str(target_folder), "speculative_config": speculative_config(export), "prompts": PROMPTS,
                    "max_tokens": 24})
    other = serve({"target": str(target_folder), "speculative_config": told, "prompts": PROMPTS, "max_tokens": 24})
    assert other["tokens"] == native["tokens"]
    assert other["accepted_per_position"] == native["accepted_per_position"]
