"""Every mistake the doctor knows, planted into a server whose counters our decoder makes: it is found and named."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Optional

import pytest
import torch

from deepspec.doctor.diagnosis import Diagnosis
from deepspec.doctor.endpoint import connect
from deepspec.doctor.exam import Exam
from deepspec.doctor.run import examine_server
from deepspec.doctor.variants import other_slots, rebuild, shuffled, with_length, without_sequential
from deepspec.doctor.vllm import VllmEngine
from deepspec.drafters.registry import shape_from
from deepspec.errors import InputRefused
from deepspec.export.evidence import gather
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.export.launch import Origin
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target
from deepspec.training.session import RunSession, shared_weights
from tests.fake_vllm import FakeVllm
from tests.trained_drafter import make_trained, prompt_ids, write_prompts
from tests.unit.export.random_run import SHA, WORDS, make_config, save_target

PROMPTS, TOKENS = 12, 40


@dataclass(frozen=True)
class Case:
    """A run on a random target with a drafter that was trained to tell layers apart."""

    config: Any
    session: RunSession
    export: Path


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("doctor")
    target_folder = save_target(folder / "target")
    config = make_config(target_folder, folder / "run")
    config.target.feature_layers = [1, 2, 3]  # so that one layer later is no last layer
    target = load_target(config.target, device="cpu", cache_dir=folder / "cache")
    shape = shape_from(target.spec, config.target, config.drafter)
    prompts = prompt_ids(PROMPTS, WORDS)
    drafter = make_trained(target, shape, prompts, steps=160)
    config.doctor.prompts = str(write_prompts(folder / "prompts.jsonl", prompts))
    config.doctor.max_new_tokens, config.doctor.max_prompts = TOKENS, PROMPTS
    origin = Origin(str(target_folder), None, target.fingerprint, "float32", SHA, "step-1",
                    str(folder / "run" / "export"), ("Qwen3ForCausalLM",))
    export = export_drafter(ExportRequest(config, target, drafter, origin, gather(
        folder / "run", SHA, target.fingerprint, shape.draft_length), folder / "run" / "records.jsonl"))
    session = RunSession(target, drafter, folder, shared_weights(target), SHA, 160)
    return Case(config, session, export)


def render(case: Case) -> Any:
    def ids(messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        return case.session.target.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options)
    return ids


def look(case: Case, drafter: Any, target: Optional[Any] = None, folder: Optional[Path] = None,
         rendering: Optional[Any] = None, before: tuple[int, ...] = (),
         longest: Optional[int] = None) -> tuple[Exam, Diagnosis]:
    """Serve ``drafter`` and examine the server. ``before``: rounds that accepted each position, of 200 earlier ones;
    ``longest``: sequence length beyond which nothing is drafted."""
    with FakeVllm(target or case.session.target, drafter, render=rendering or render(case), longest=longest) as server:
        if before:
            server.drafts, server.accepted = 200, list(before)
        config = replace(case.config, doctor=replace(case.config.doctor, endpoint=server.url,
                                                     drafter=str(folder or case.export)))
        return examine_server(config, case.session, connect(config.doctor))


def shifted(case: Case, shift: int) -> FrozenTarget:
    """The same target, other layers captured."""
    target = case.session.target
    layers = [layer + shift for layer in target.feature_layers]
    return FrozenTarget(target._model, target.tokenizer, feature_layers=layers, mask_token_id=target.mask_token_id)


def planted(case: Case) -> dict[str, Any]:
    """Cause -> what the engine runs instead."""
    drafter, shape = case.session.drafter, case.session.drafter.shape
    return {
        "slots": rebuild(drafter, other_slots(shape)),
        "mask_token": rebuild(drafter, replace(shape, mask_token_id=1)),
        "rope": rebuild(drafter, replace(shape, rope_theta=1e6, rope_parameters={
            **shape.rope_parameters, "rope_theta": 1e6})),
        "lm_head": rebuild(drafter, lm_head=drafter.shared.embed),
        "embedding": rebuild(drafter, embed=shuffled(drafter.shared.embed)),
        "sequential_head": without_sequential(drafter),
    }


def causes(diagnosis: Diagnosis) -> list[str]:
    return [item.cause for item in diagnosis.findings if item.kind == "fault"]


def test_a_healthy_server(case: Case) -> None:
    exam, diagnosis = look(case, case.session.drafter)
    assert diagnosis.healthy and causes(diagnosis) == []
    assert exam.served.prompts == exam.expected.prompts == exam.offline.prompts  # the replay is exact
    assert exam.served.acceptance_length > 1.8 and not exam.text.different


@pytest.mark.parametrize("cause", ["slots", "mask_token", "rope", "lm_head", "embedding", "sequential_head"])
def test_what_the_engine_does_wrong_is_named_from_its_counts(case: Case, cause: str) -> None:
    """The files are right; only acceptance can tell."""
    exam, diagnosis = look(case, planted(case)[cause])
    if cause == "sequential_head" and not diagnosis.short:
        pytest.skip(f"this drafter does not need it: {exam.served.acceptance_length} of "
                    f"{exam.offline.acceptance_length}")
    assert not diagnosis.healthy and causes(diagnosis) == [cause]
    found = diagnosis.findings[0]
    assert found.found_by == "acceptance" and found.probability > 0.9 and found.explains == 1.0


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_layer_shift(case: Case, shift: int) -> None:
    exam, diagnosis = look(case, case.session.drafter, shifted(case, shift))
    assert exam.served.acceptance_length < 1.1 and causes(diagnosis) == ["layers"]
    wrong = str([layer + shift for layer in case.session.drafter.shape.feature_layers])
    assert wrong in diagnosis.findings[0].says and diagnosis.findings[0].probability > 0.9


def test_what_the_prompts_leave_open_is_decided_by_trials(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is accepted with a head of another model, nor one layer off: only answers made of the suspects' drafts
    tell them apart. The head planted is not the one that the doctor has for such heads."""
    head = case.session.drafter.shared.lm_head
    other = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(77))]
    exam, diagnosis = look(case, rebuild(case.session.drafter, lm_head=other))
    assert exam.served.acceptance_length < 1.1 and causes(diagnosis) == ["lm_head"]
    assert exam.trials is not None and exam.trials.rounds > 0
    assert "LM head is not the target's" in diagnosis.findings[0].says
    monkeypatch.setattr("deepspec.doctor.run.settle", lambda engine, target, exam, certainty: exam)
    _, diagnosis = look(case, rebuild(case.session.drafter, lm_head=other))
    assert causes(diagnosis) == ["undecided"] and "layers" in diagnosis.findings[0].says


def test_a_server_that_refuses_restricted_answers_leaves_it_open(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = VllmEngine.answer

    def refuse(self: VllmEngine, ids: Any, tokens: int, only: Any = ()) -> Any:
        if only:
            raise InputRefused("allowed_token_ids is not supported")
        return whole(self, ids, tokens)

    monkeypatch.setattr(VllmEngine, "answer", refuse)
    exam, diagnosis = look(case, case.session.drafter, shifted(case, 1))
    assert exam.trials is None and causes(diagnosis) == ["undecided"]


def test_drafting_that_ends_at_a_length(case: Case) -> None:
    """Counts and rounds as if nothing were wrong, on the part that was drafted."""
    exam, diagnosis = look(case, case.session.drafter, longest=28)
    assert causes(diagnosis) == ["length"] and exam.served.prompts == exam.expected.prompts
    first, last = exam.coverage.limit
    assert 28 - 5 <= first <= last <= 28 + 5


@pytest.mark.parametrize("key, value, cause", [
    ("target_layer_ids", [2, 3, 4], "layers"), ("mask_token_id", 1, "mask_token"),
    ("sample_from_anchor", False, "slots"), ("rope_theta", 1e6, "rope"), ("max_position_embeddings", 64, "length"),
])
def test_wrong_files(case: Case, tmp_path: Path, key: str, value: Any, cause: str) -> None:
    """Found without any acceptance, before the server even accepts less."""
    folder = edited(case.export, tmp_path / "served", **{key: value})
    exam, diagnosis = look(case, case.session.drafter, folder=folder)
    assert cause in causes(diagnosis) and not diagnosis.healthy
    assert any(key.split("_")[0] in item.says for item in diagnosis.findings)


def test_a_served_folder_that_explains_its_own_counts(case: Case, tmp_path: Path) -> None:
    drafter = case.session.drafter
    folder = edited(case.export, tmp_path / "served", mask_token_id=1)
    _, diagnosis = look(case, rebuild(drafter, replace(drafter.shape, mask_token_id=1)), folder=folder)
    first = diagnosis.findings[0]
    assert first.cause == "mask_token" and first.found_by == "files"
    if diagnosis.short:
        assert first.probability > 0.9


def test_wrong_tensors(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = edited(case.export, tmp_path / "served")
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = shuffled(stored["lm_head.weight"]).contiguous()
    save_file(stored, folder / "model.safetensors")
    served = rebuild(case.session.drafter, lm_head=stored["lm_head.weight"])
    _, diagnosis = look(case, served, folder=folder)
    assert causes(diagnosis) == ["lm_head"] and diagnosis.findings[0].probability > 0.5


def test_too_few_and_too_many_draft_tokens(case: Case) -> None:
    drafter = case.session.drafter
    for length in (1, 6):
        exam, diagnosis = look(case, rebuild(drafter, with_length(drafter.shape, length)))
        assert exam.draft_length == length and causes(diagnosis) == ["num_speculative_tokens"]
        assert "num_speculative_tokens=4" in diagnosis.findings[0].fix


def test_another_chat_template(case: Case) -> None:
    ids = render(case)
    _, diagnosis = look(case, case.session.drafter, rendering=lambda messages, options: [9, *ids(messages, options)])
    assert causes(diagnosis) == ["chat_template"] and "from token 0 on" in diagnosis.findings[0].says


def test_thinking_mode_of_plain_requests(case: Case) -> None:
    ids = render(case)
    config = replace(case.config, target=replace(case.config.target, thinking=False))
    other = Case(config, case.session, case.export)
    _, diagnosis = look(other, case.session.drafter, rendering=lambda messages, options: (
        ids(messages, {}) if options.get("enable_thinking") is False else [*ids(messages, {}), 9]))
    assert causes(diagnosis) == ["thinking"] and "enable_thinking: false" in diagnosis.findings[0].fix


def test_altered_and_other_targets(case: Case, tmp_path: Path) -> None:
    """Weights rounded to four bits per row, and another model altogether."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.config.target.path, dtype=torch.float32)
    for layer in model.model.layers:
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                scale = parameter.data.abs().amax(dim=1, keepdim=True) / 7
                parameter.data = (parameter.data / scale).round() * scale
    rounded = FrozenTarget(model, case.session.target.tokenizer, feature_layers=case.session.target.feature_layers,
                           mask_token_id=case.session.target.mask_token_id)
    exam, diagnosis = look(case, case.session.drafter, rounded)
    assert exam.text.different and set(causes(diagnosis)) & {"quantised_target", "base_model"}
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.08)
    _, diagnosis = look(case, case.session.drafter, rounded)
    assert "base_model" in causes(diagnosis)


def test_traffic_that_accepts_less_than_the_reference(case: Case) -> None:
    exam, diagnosis = look(case, case.session.drafter, before=(30, 5, 1, 0))
    assert exam.traffic.rounds == 200 and exam.served.prompts == exam.expected.prompts
    assert causes(diagnosis) == ["traffic"] and "accepted 1.18 tokens" in diagnosis.findings[0].says


def edited(export: Path, folder: Path, **changes: Any) -> Path:
    """A copy of an export with other values in config.json, in both places."""
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_bytes((export / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config[key] = value
        if key in config["dflash_config"]:
            config["dflash_config"][key] = value
        if key == "rope_theta":
            config["rope_parameters"]["rope_theta"] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
