"""The doctor against real vLLM on the CPU: a healthy server, and every fault that can be planted there.

The doctor is told of the export as it was written; the server gets a copy with one thing wrong, so that only what the
engine does can give the fault away. Needs DEEPSPEC_VLLM_PYTHON.
"""

import contextlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Optional

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
from deepspec.drafters.registry import shape_from
from deepspec.targets.load import load_target
from deepspec.training.session import RunSession, shared_weights
from tests.trained_drafter import make_trained, prompt_ids, write_prompts

pytestmark = pytest.mark.skipif(not PYTHON, reason="DEEPSPEC_VLLM_PYTHON is not set: no vLLM to serve with")
MESSAGES = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
THINKING = MESSAGES + "{% if enable_thinking is defined and not enable_thinking %}w8 {% endif %}"
OTHER = "w9 " + MESSAGES
LEVELS = 31  # of either sign, per row: about five bits
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark": {}, "dflash-1+N": {"algorithm": "dflash", "head": "none", "confidence_head": False,
                                 "sample_from_anchor": False, "block_size": 5}}


@dataclass(frozen=True)
class Case:
    """A run on a random target with a trained drafter, exported."""

    config: Any
    session: RunSession
    export: Path
    target: Path


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("doctor") / "target", sharp=6.0, template=THINKING)


@pytest.fixture(scope="module", params=["dspark"])
def case(request: pytest.FixtureRequest, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("doctor")
    config = make_config(target_folder, folder / "run", **DRAFTERS[request.param])
    target = load_target(config.target, device="cpu", cache_dir=folder / "cache")
    prompts = prompt_ids(8, 900, seed=4)
    drafter = make_trained(target, shape_from(target.spec, config.target, config.drafter), prompts, steps=120)
    config.doctor.prompts = str(write_prompts(folder / "prompts.jsonl", prompts))
    config.doctor.max_new_tokens, config.doctor.max_prompts = 32, len(prompts)
    session = RunSession(target, drafter, folder, shared_weights(target), SHA, 120)
    return Case(config, session, export_model(config, target, drafter), target_folder)


def look(case: Case, url: str, thinking: Optional[bool] = None) -> tuple[Exam, Diagnosis]:
    """Examine the server at ``url``. ``thinking``: the mode that training had."""
    config = replace(case.config, doctor=replace(case.config.doctor, endpoint=url, drafter=str(case.export)),
                     target=replace(case.config.target, thinking=thinking))
    exam, diagnosis = examine_server(config, case.session, connect(config.doctor))
    print(paragraph(diagnosis, exam))
    return exam, diagnosis


@contextlib.contextmanager
def served(case: Case, place: Path, *arguments: str, target: Optional[Path] = None, head: bool = False, runner: int = 2,
           told: Optional[dict[str, Any]] = None, **changes: Any) -> Iterator[str]:
    """A server of a copy of the export with changes, of which the doctor does not know. ``told``: other values in the
    speculative configuration, ``head``: another LM head, ``changes``: other values in config.json."""
    folder = edited(case.export, place / "served", head=head, **changes)
    speculative = speculative_config(case.export) | {"model": str(folder)} | (told or {})
    with vllm_server(target or case.target, speculative, place / "vllm.log", *arguments, runner=runner) as url:
        yield url


def edited(export: Path, place: Path, *, head: bool = False, **changes: Any) -> Path:
    from safetensors.torch import load_file, save_file

    place.mkdir()
    stored = load_file(export / "model.safetensors")
    if head:  # not the order in which the doctor itself shuffles
        matrix = stored["lm_head.weight"]
        order = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(77))
        stored["lm_head.weight"] = matrix[order].contiguous()
    save_file(stored, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((export / "config.json").read_text())
    for key, value in changes.items():
        for part in (config, config["dflash_config"], config["rope_parameters"]):
            if key in part:
                part[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


def quantised(target: Path, place: Path) -> Path:
    """A copy of the target with the matrices of its layers rounded to ``LEVELS``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, place)
    stored = load_file(target / "model.safetensors")
    for name, value in stored.items():
        if ".layers." in name and value.dim() == 2:
            scale = value.abs().amax(dim=1, keepdim=True) / LEVELS
            stored[name] = ((value / scale).round() * scale).contiguous()
    save_file(stored, place / "model.safetensors", metadata={"format": "pt"})
    return place


def causes(diagnosis: Diagnosis) -> list[str]:
    return [item.cause for item in diagnosis.findings if item.kind == "fault"]


def test_healthy_and_the_thinking_mode_of_plain_requests(case: Case, tmp_path: Path) -> None:
    with served(case, tmp_path) as url:
        exam, diagnosis = look(case, url)
        assert diagnosis.healthy and exam.alone and not exam.text.different
        assert exam.served.prompts == exam.expected.prompts  # our replay predicts every prompt's counts exactly
        _, diagnosis = look(case, url, thinking=False)
    assert causes(diagnosis) == ["thinking"] and "enable_thinking: false" in diagnosis.findings[0].fix


def test_layer_shift(case: Case, tmp_path: Path) -> None:
    with served(case, tmp_path, target_layer_ids=[2, 3, 5]) as url:
        exam, diagnosis = look(case, url)
    assert exam.served.acceptance_length < 1.2 and causes(diagnosis) == ["layers"]
    assert "[2, 3, 5] instead of [1, 2, 4]" in diagnosis.findings[0].says and diagnosis.findings[0].probability > 0.9


def test_wrong_head(case: Case, tmp_path: Path) -> None:
    """As little is accepted as with a layer shift."""
    with served(case, tmp_path, head=True) as url:
        exam, diagnosis = look(case, url)
    assert exam.served.acceptance_length < 1.2 and exam.trials is not None and causes(diagnosis) == ["lm_head"]
    assert "LM head is not the target's" in diagnosis.findings[0].says


def test_slot_convention(case: Case, tmp_path: Path) -> None:
    with served(case, tmp_path, sample_from_anchor=False) as url:
        _, diagnosis = look(case, url)
    assert causes(diagnosis) == ["slots"] and diagnosis.findings[0].probability > 0.9


def test_mask_token(case: Case, tmp_path: Path) -> None:
    with served(case, tmp_path, mask_token_id=2) as url:  # the end-of-turn token
        _, diagnosis = look(case, url)
    assert causes(diagnosis) == ["mask_token"]
    assert "token 2 instead of the mask token 1000" in diagnosis.findings[0].says


def test_rope(case: Case, tmp_path: Path) -> None:
    with served(case, tmp_path, rope_theta=1e6) as url:
        _, diagnosis = look(case, url)
    assert causes(diagnosis) == ["rope"] and "base 1e+06 instead of 10000" in diagnosis.findings[0].says


def test_number_of_draft_tokens_and_chat_template(case: Case, tmp_path: Path) -> None:
    """Two faults at once, both named."""
    (tmp_path / "other.jinja").write_text(OTHER)
    with served(case, tmp_path, "--chat-template", str(tmp_path / "other.jinja"),
                told={"num_speculative_tokens": 2}) as url:
        exam, diagnosis = look(case, url)
    assert exam.draft_length == 2 and set(causes(diagnosis)) == {"num_speculative_tokens", "chat_template"}
    assert exam.served.prompts == exam.expected.prompts


def test_quantised_target(case: Case, tmp_path: Path) -> None:
    with served(case, tmp_path, target=quantised(case.target, tmp_path / "quantised")) as url:
        exam, diagnosis = look(case, url)
    assert exam.text.different and causes(diagnosis) == ["quantised_target"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
