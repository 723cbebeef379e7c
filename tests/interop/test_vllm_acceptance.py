"""Trained drafters of every kind in real vLLM on the CPU: greedy output is the target's, acceptance is our decoder's,
and a wrong layer id, slot convention or mask token shows. Needs DEEPSPEC_VLLM_PYTHON.

The drafters are trained here in about a minute each, also to tell neighbouring layers apart: without that a shift by
one layer would go unnoticed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from random_export import export_model, make_config, save_target
from test_vllm import PYTHON, serve, speculative_config

from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeResult, RoundRecord
from deepspec.drafters.registry import shape_from
from deepspec.drafters.sequential import sample_block
from deepspec.export.load import load_exported
from deepspec.targets.load import load_target
from deepspec.targets.sampling import Sampling
from tests.trained_drafter import make_trained, prompt_ids

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
DFLASH = {"algorithm": "dflash", "head": "none", "confidence_head": False}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {}, "dspark-bonus-anchor": {"sample_from_anchor": False}, "dflash-anchor": DFLASH,
    "dflash-1+N": DFLASH | {"sample_from_anchor": False, "block_size": 5},
    "eagle3": {"algorithm": "eagle3", "num_layers": 1, "head": "none", "confidence_head": False},
}
TOKENS, STEPS = 32, 120
PROMPTS = prompt_ids(8, 900, seed=4)


@dataclass(frozen=True)
class Trained:
    """A drafter that accepts much on ``PROMPTS``, exported."""

    target: Any
    folder: Path  # of the target
    export: Path


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), sharp=6.0)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run_dir = tmp_path_factory.mktemp("run")
    config = make_config(target_folder, run_dir, **DRAFTERS[request.param])
    target = load_target(config.target, device="cpu", cache_dir=run_dir / "data")
    drafter = make_trained(target, shape_from(target.spec, config.target, config.drafter), PROMPTS, steps=STEPS)
    if drafter.confidence_head is not None:  # not trained here: its values must matter in a comparison
        torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.3)
    return Trained(target, target_folder, export_model(config, target, drafter))


def decoded(case: Trained, temperature: float, seed: int = 0, tokens: int = TOKENS) -> list[DecodeResult]:
    """Answers of our decoder with the exported drafter, end-of-turn tokens ignored."""
    drafter, _ = load_exported(case.export)
    decoder = SpeculativeDecoder(case.target, drafter, Sampling(temperature=temperature, seed=seed),
                                 batch_size=len(PROMPTS), max_new_tokens=tokens, ignore_eos=True)
    requests = [DecodeRequest(str(number), tuple(prompt)) for number, prompt in enumerate(PROMPTS)]
    return sorted(decoder.decode(requests), key=lambda result: int(result.id))


def ours(case: Trained, temperature: float, seed: int = 0, tokens: int = TOKENS) -> list[RoundRecord]:
    """Rounds of ``decoded``."""
    return [item for result in decoded(case, temperature, seed, tokens) for item in result.rounds]


def length(rounds: list[RoundRecord]) -> float:
    return 1 + sum(item.accepted for item in rounds) / len(rounds)


def served(case: Trained, export: Path, **job: Any) -> dict[str, Any]:
    return serve({"target": str(case.folder), "speculative_config": speculative_config(case.export) | {
        "model": str(export)}, "prompts": PROMPTS, "max_tokens": TOKENS} | job, timeout=1200)


def edited(case: Trained, place: Path, **changes: Any) -> Path:
    """A copy of the export with other values in config.json, wherever it has them."""
    place.mkdir()
    (place / "model.safetensors").write_bytes((case.export / "model.safetensors").read_bytes())
    config = json.loads((case.export / "config.json").read_text())
    for key, value in changes.items():
        for part in (config, config.get("dflash_config", {})):
            if key in part:
                part[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("trained", DRAFTERS, ids=DRAFTERS, indirect=True)
def test_greedy_output_and_acceptance(trained: Trained, tmp_path: Path) -> None:
    """Also with one layer id too high, which costs what it should."""
    report = served(trained, trained.export, alone=True)
    results = decoded(trained, 0.0)
    mine = length([item for result in results for item in result.rounds])
    print(f"acceptance length: vLLM {report['acceptance_length']:.4f} ({report['rounds']} rounds), ours {mine:.4f}")
    assert report["greedy_equal"] and report["tokens"] == [list(result.token_ids) for result in results]
    assert mine > 1.5
    assert abs(report["acceptance_length"] - mine) <= 0.02
    config = json.loads((trained.export / "config.json").read_text())
    wrong = {key: [layer + 1 for layer in config[key]] for key in (
        "target_layer_ids", "eagle_aux_hidden_state_layer_ids") if key in config}
    shifted = served(trained, edited(trained, tmp_path / "layers", **wrong))
    print(f"one layer off: {shifted['acceptance_length']:.4f}")
    assert shifted["tokens"] == report["tokens"]
    assert shifted["acceptance_length"] < mine - 0.2


@pytest.mark.parametrize("trained", ["dspark"], indirect=True)
def test_sampled_acceptance(trained: Trained) -> None:
    """At temperature 1 within three standard errors."""
    report = served(trained, trained.export, temperature=1.0, max_tokens=48)
    rounds = [item.accepted for seed in range(6) for item in ours(trained, 1.0, seed, 48)]
    spread = torch.tensor(rounds, dtype=torch.float64).std().item()
    error = spread * (1 / report["rounds"] + 1 / len(rounds)) ** 0.5
    gap = report["acceptance_length"] - 1 - sum(rounds) / len(rounds)
    print(f"temperature 1: vLLM {report['acceptance_length']:.3f} ({report['rounds']} rounds), ours "
          f"{1 + sum(rounds) / len(rounds):.3f} ({len(rounds)} rounds), {gap / error:+.2f} standard errors")
    assert abs(gap) <= 3 * error


@pytest.mark.parametrize("trained", ["dspark"], indirect=True)
@pytest.mark.parametrize("change", [{"sample_from_anchor": False}, {"mask_token_id": 3}], ids=["slots", "mask"])
def test_a_wrong_convention_shows(trained: Trained, tmp_path: Path, change: dict[str, Any]) -> None:
    report = served(trained, edited(trained, tmp_path / "wrong", **change))
    mine = length(ours(trained, 0.0))
    print(f"{change}: {report['acceptance_length']:.4f}, as trained {mine:.4f}")
    assert report["acceptance_length"] < mine - 0.05


@torch.no_grad()
def our_confidences(case: Trained, prompt: list[int], tokens: list[int]) -> list[tuple[list[int], list[float]]]:
    """Greedy drafts after each of ``tokens`` and the sigmoid of the confidence head for each draft."""
    drafter, _ = load_exported(case.export)
    ids = torch.tensor(prompt + tokens)
    features = case.target.encode(ids, [len(ids)]).features
    keys, values = drafter.context_kv(drafter.project_context(features), torch.arange(len(ids)))
    found = []
    for anchor in range(len(prompt), len(ids)):
        place = torch.tensor([anchor])
        hidden = drafter.block_hidden(ids[place], place, keys[:, None], values[:, None], place)
        block = sample_block(drafter, ids[place], hidden, lambda k, logits: logits.argmax(dim=-1))
        found.append((block.token_ids[0].tolist(), block.confidence_logits[0].sigmoid().tolist()))
    return found


@pytest.mark.parametrize("trained", ["dspark"], indirect=True)
def test_confidences_are_ours(trained: Trained) -> None:
    report = served(trained, trained.export, prompts=PROMPTS[:1], record=True, confidence=True)
    tokens = report["tokens"][0]
    expected = our_confidences(trained, PROMPTS[0], tokens)
    place, worst, compared = 0, 0.0, 0
    for drafts, confidences in zip(report["drafts"][0], report["confidences"][0], strict=True):
        if place >= len(tokens):
            break
        own_drafts, own = expected[place]
        if own_drafts == drafts:
            worst = max([worst, *(abs(a - b) for a, b in zip(confidences, own, strict=True))])
            compared += 1
        accepted = 0
        while accepted < len(drafts) and tokens[place + 1 + accepted:place + 2 + accepted] == [drafts[accepted]]:
            accepted += 1
        place += accepted + 1
    print(f"largest difference of {compared} rounds' confidences: {worst:.2g}")
    assert compared >= 5 and worst <= 1e-6
