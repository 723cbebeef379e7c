"""The doctor against real vLLM on the CPU: a healthy server, and every fault that can be planted there.

The doctor is told of the export as it was written; the server gets a copy with one thing wrong, so that only what the
engine does can give the fault away. Needs DEEPSPEC_VLLM_PYTHON.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
from random_export import SHA, export_model, make_config, save_target
from serving import vllm_server
from test_vllm import PYTHON, speculative_config

from deepspec.doctor.diagnosis import Diagnosis
from deepspec.doctor.endpoint import connect
from deepspec.doctor.exam import Exam
from deepspec.doctor.report import paragraph
from deepspec.doctor.run import examine_server
from deepspec.doctor.variants import shuffled
from deepspec.drafters.registry import shape_from
from deepspec.targets.load import load_target
from deepspec.training.session import RunSession, shared_weights
from tests.trained_drafter import make_trained, prompt_ids, write_prompts

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
Examine = Callable[..., tuple[Exam, Diagnosis]]
TEMPLATE = "w9 {% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("doctor")
    target_folder = save_target(folder / "target", sharp=6.0)
    config = make_config(target_folder, folder / "run")
    target = load_target(config.target, device="cpu", cache_dir=folder / "cache")
    prompts = prompt_ids(8, 900, seed=4)
    drafter = make_trained(target, shape_from(target.spec, config.target, config.drafter), prompts, steps=120)
    config.doctor.prompts = str(write_prompts(folder / "prompts.jsonl", prompts))
    config.doctor.max_new_tokens, config.doctor.max_prompts = 32, len(prompts)
    session = RunSession(target, drafter, folder, shared_weights(target), SHA, 120)
    yield {"config": config, "session": session, "export": export_model(config, target, drafter),
           "target": target_folder}


@pytest.fixture
def examine(case: dict[str, Any], tmp_path: Path) -> Examine:
    """Serve a copy of the export with changes, and let the doctor look, who knows of the unchanged one."""
    def run(*arguments: str, tokens: int = 4, swap_head: bool = False, **changes: Any) -> tuple[Exam, Diagnosis]:
        folder = edited(case["export"], tmp_path / "served", swap_head=swap_head, **changes)
        told = speculative_config(case["export"]) | {"model": str(folder), "num_speculative_tokens": tokens}
        with vllm_server(case["target"], told, tmp_path / "vllm.log", *arguments) as url:
            config = replace(case["config"], doctor=replace(case["config"].doctor, endpoint=url,
                                                            drafter=str(case["export"])))
            exam, diagnosis = examine_server(config, case["session"], connect(config.doctor))
        print(paragraph(diagnosis, exam))
        return exam, diagnosis

    return run


def edited(export: Path, place: Path, *, swap_head: bool = False, **changes: Any) -> Path:
    from safetensors.torch import load_file, save_file

    place.mkdir()
    stored = load_file(export / "model.safetensors")
    if swap_head:
        stored["lm_head.weight"] = shuffled(stored["lm_head.weight"]).contiguous()
    save_file(stored, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((export / "config.json").read_text())
    for key, value in changes.items():
        for part in (config, config["dflash_config"]):
            if key in part:
                part[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


def causes(diagnosis: Diagnosis) -> list[str]:
    return [item.cause for item in diagnosis.findings if item.kind == "fault"]


def test_healthy(examine: Examine) -> None:
    exam, diagnosis = examine()
    assert diagnosis.healthy and exam.alone and not exam.text.different
    assert exam.served.prompts == exam.expected.prompts  # our replay predicts every prompt's counts exactly


def test_layer_shift(examine: Examine) -> None:
    exam, diagnosis = examine(target_layer_ids=[2, 3, 5])
    assert exam.served.acceptance_length < 1.2 and causes(diagnosis)[0] in ("layers", "undecided")
    assert "[2, 3, 5] instead of [1, 2, 4]" in diagnosis.findings[0].says


def test_slot_convention(examine: Examine) -> None:
    _, diagnosis = examine(sample_from_anchor=False)
    assert causes(diagnosis) == ["slots"] and diagnosis.findings[0].probability > 0.9


def test_mask_token(examine: Examine) -> None:
    _, diagnosis = examine(mask_token_id=2)  # the end-of-turn token
    assert causes(diagnosis) == ["mask_token"]
    assert "token 2 instead of the mask token 1000" in diagnosis.findings[0].says


def test_wrong_head(examine: Examine) -> None:
    exam, diagnosis = examine(swap_head=True)
    assert exam.served.acceptance_length < 1.2 and not diagnosis.healthy
    assert causes(diagnosis)[0] in ("lm_head", "undecided") and "LM head" in diagnosis.findings[0].says


def test_number_of_draft_tokens(examine: Examine) -> None:
    exam, diagnosis = examine(tokens=2)
    assert exam.draft_length == 2 and causes(diagnosis) == ["num_speculative_tokens"]
    assert exam.served.prompts == exam.expected.prompts


def test_chat_template(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text(TEMPLATE)
    _, diagnosis = examine("--chat-template", str(tmp_path / "other.jinja"))
    assert causes(diagnosis) == ["chat_template"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
