"""Trained drafters of every kind in real vLLM on the CPU: greedy output is the target's, acceptance is our decoder's at
temperature 0 and 1, and a wrong layer id, slot convention or mask token shows. Needs DEEPSPEC_VLLM_PYTHON.

The drafters are trained here in seconds, also to tell neighbouring layers apart: without that a shift by one layer
would go unnoticed. All engines of one drafter and one runner of vLLM run in one process.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import accepted, decoded, length, standard_errors, worst_confidence
from random_export import export_model, make_config, save_target
from test_vllm import PYTHON, serve_all, speculative_config
from vllm_acceptance import needs_second

from deepspec.drafters.registry import shape_from
from deepspec.targets.load import load_target
from tests.trained_drafter import make_trained, prompt_ids

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
DFLASH = {"algorithm": "dflash", "head": "none", "confidence_head": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {}, "dspark-bonus-anchor": {"sample_from_anchor": False}, "dflash-anchor": DFLASH,
    "dflash-1+N": DFLASH | {"sample_from_anchor": False, "block_size": 5},
    "eagle3": {"algorithm": "eagle3", "num_layers": 1, "head": "none", "confidence_head": False},
}
TOKENS, SAMPLED, STEPS, SEEDS = 32, 48, 120, 6
PROMPTS = prompt_ids(8, 900, seed=4)


@dataclass(frozen=True)
class Trained:
    """A drafter that accepts much on ``PROMPTS``, exported, and what vLLM reported of it under several conditions."""

    target: Any
    export: Path
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), sharp=6.0)


def conditions(export: Path, place: Path) -> dict[str, dict[str, Any]]:
    """Jobs by name: as exported, sampled, one layer off; DSpark's also with the other slots, another mask token, and
    with its drafts and confidences recorded."""
    config = json.loads((export / "config.json").read_text())
    layers = {key: [layer + 1 for layer in config[key]] for key in (
        "target_layer_ids", "eagle_aux_hidden_state_layer_ids") if key in config}
    jobs: dict[str, dict[str, Any]] = {
        "greedy": {"alone": True}, "sampled": {"temperature": 1.0, "max_tokens": SAMPLED},
        "layers": {"export": edited(export, place / "layers", **layers)}}
    if "enable_confidence_head" in config and config["enable_confidence_head"] and config["sample_from_anchor"]:
        jobs["slots"] = {"export": edited(export, place / "slots", sample_from_anchor=False)}
        jobs["mask"] = {"export": edited(export, place / "mask", mask_token_id=3)}
        jobs["confidences"] = {"prompts": PROMPTS[:1], "record": True, "confidence": True}
    return jobs


@pytest.fixture(scope="module", params=DRAFTERS)
def trained(request: pytest.FixtureRequest, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run_dir = tmp_path_factory.mktemp("run")
    config = make_config(target_folder, run_dir, **DRAFTERS[request.param])
    target = load_target(config.target, device="cpu", cache_dir=run_dir / "data")
    drafter = make_trained(target, shape_from(target.spec, config.target, config.drafter), PROMPTS, steps=STEPS)
    if drafter.confidence_head is not None:  # not trained here: its values must matter in a comparison
        torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.3)
    export = export_model(config, target, drafter)
    jobs = conditions(export, tmp_path_factory.mktemp("wrong"))
    told = [{"target": str(target_folder), "prompts": PROMPTS, "max_tokens": TOKENS,
             "speculative_config": speculative_config(export) | {"model": str(job.pop("export", export))}} | job
            for job in jobs.values()]
    reports: dict[str, dict[str, Any]] = {}
    for second in (False, True):  # one process for each of vLLM's runners
        names = [name for name, job in zip(jobs, told) if needs_second(job) == second]
        if names:
            reports |= zip(names, serve_all([job for name, job in zip(jobs, told) if name in names]))
    return Trained(target, export, reports)


def edited(export: Path, place: Path, **changes: Any) -> Path:
    """A copy of the export with other values in config.json, wherever it has them."""
    place.mkdir()
    (place / "model.safetensors").write_bytes((export / "model.safetensors").read_bytes())
    config = json.loads((export / "config.json").read_text())
    for key, value in changes.items():
        for part in (config, config.get("dflash_config", {})):
            if key in part:
                part[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_greedy_output_and_acceptance(trained: Trained) -> None:
    report = trained.reports["greedy"]
    results = decoded(trained.target, trained.export, PROMPTS, tokens=TOKENS)
    mine = length(accepted(results))
    print(f"temperature 0: vLLM {report['acceptance_length']:.4f} ({report['rounds']} rounds), ours {mine:.4f}")
    assert report["greedy_equal"] and report["tokens"] == [list(result.token_ids) for result in results]
    assert mine > 1.5
    assert abs(report["acceptance_length"] - mine) <= 0.02


def test_sampled_acceptance(trained: Trained) -> None:
    """At temperature 1 within three standard errors."""
    report = trained.reports["sampled"]
    rounds = [item for seed in range(SEEDS) for item in accepted(decoded(
        trained.target, trained.export, PROMPTS, tokens=SAMPLED, temperature=1.0, seed=seed))]
    gap, error = standard_errors(report, rounds)
    print(f"temperature 1: vLLM {report['acceptance_length']:.4f} ({report['rounds']} rounds), ours "
          f"{length(rounds):.4f} ({len(rounds)} rounds), s.e. {error:.4f}, {gap:+.2f} standard errors")
    assert length(rounds) > 1.1 and abs(gap) <= 3


def test_a_layer_off_shows(trained: Trained) -> None:
    shifted, report = trained.reports["layers"], trained.reports["greedy"]
    print(f"one layer off: {shifted['acceptance_length']:.4f}")
    assert shifted["tokens"] == report["tokens"]
    assert shifted["acceptance_length"] < report["acceptance_length"] - 0.2


@pytest.mark.parametrize("trained", ["dspark"], indirect=True)
@pytest.mark.parametrize("change", ["slots", "mask"])
def test_a_wrong_convention_shows(trained: Trained, change: str) -> None:
    wrong, right = (trained.reports[name]["acceptance_length"] for name in (change, "greedy"))
    print(f"wrong {change}: {wrong:.4f}, as trained {right:.4f}")
    assert wrong < right - 0.05


@pytest.mark.parametrize("trained", ["dspark"], indirect=True)
def test_confidences_are_ours(trained: Trained) -> None:
    worst, compared = worst_confidence(trained.target, trained.export, PROMPTS[0], trained.reports["confidences"])
    print(f"largest difference of {compared} rounds' confidences: {worst:.2g}")
    assert compared >= 5 and worst <= 1e-6
