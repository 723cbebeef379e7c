"""The adapters of both engines against recorded answers. SGLang's are written after its source: no server was run."""

from typing import Any, Mapping, Optional

import pytest

from deepspec.config.schema_serving import DoctorConfig
from deepspec.doctor import endpoint
from deepspec.doctor.counts import PromptCounts
from deepspec.doctor.endpoint import ServerFacts
from deepspec.doctor.sglang import SglangEngine
from deepspec.doctor.vllm import VllmEngine
from deepspec.errors import InputRefused

INFO = {"version": "0.5.23", "model_path": "target", "speculative_algorithm": "DSPARK", "dtype": "bfloat16",
        "speculative_dspark_block_size": 4, "speculative_num_draft_tokens": 5, "context_length": 4096,
        "speculative_draft_model_path": "drafter", "quantization": "fp8"}
META = {"completion_tokens": 12, "spec_verify_ct": 5, "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 20,
        "spec_correct_drafts_histogram": [1, 2, 2]}


class Stub:
    """An ``Http`` with recorded answers by path."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"/" + key.replace("__", "/"): value for key, value in answers.items()}
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def find(self, path: str) -> Optional[Any]:
        return self.answers.get(path)

    def text(self, path: str) -> Optional[str]:
        return self.answers.get(path)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        self.asked.append((path, body))
        return self.answers[path]

    def try_ask(self, path: str, body: Mapping[str, Any]) -> Optional[Any]:
        self.asked.append((path, body))
        return self.answers.get(path)


def test_sglang_counts_every_answer() -> None:
    http = Stub(get_server_info=INFO, generate={"output_ids": list(range(12)), "meta_info": META})
    engine = SglangEngine(http)
    assert engine.facts == ServerFacts("sglang", "0.5.23", "target", "target", 4096, "bfloat16", "fp8", "drafter",
                                       "DSPARK", 4)
    answer = engine.answer([5, 6], 12)
    assert answer.token_ids == tuple(range(12)) and answer.counts == PromptCounts(5, 20, 6, (4, 2))
    body = http.asked[0][1]
    assert body["input_ids"] == [5, 6] and body["sampling_params"]["ignore_eos"] is True
    engine.answer([5, 6], 12, (3, 9))
    assert set(http.asked[1][1]["sampling_params"]["logit_bias"]) == {"3", "9"}
    assert engine.totals() is None and engine.render([], {}) is None


def test_sglang_without_a_histogram_or_without_rounds() -> None:
    meta = {key: value for key, value in META.items() if key != "spec_correct_drafts_histogram"}
    http = Stub(get_server_info=INFO, generate=[{"output_ids": [1], "meta_info": meta}])
    assert SglangEngine(http).answer([5], 12).counts == PromptCounts(5, 20, 6)
    http.answers["/generate"] = {"output_ids": [1], "meta_info": {"completion_tokens": 1}}
    assert SglangEngine(http).answer([5], 12).counts is None
    http.answers["/generate"] = {"text": "a"}
    with pytest.raises(InputRefused, match="no output_ids"):
        SglangEngine(http).answer([5], 12)
    with pytest.raises(InputRefused, match="not SGLang"):
        SglangEngine(Stub())


def test_vllm_needs_its_model_its_counters_and_token_ids() -> None:
    models = {"data": [{"id": "a", "root": "r", "max_model_len": 99}, {"id": "b"}]}
    engine = VllmEngine(Stub(v1__models=models, version={"version": "1"}), "b")
    assert engine.facts.model == "b" and VllmEngine(Stub(v1__models=models)).facts.max_length == 99
    with pytest.raises(InputRefused, match="lists the models .'a', 'b'., not doctor.model='c'"):
        VllmEngine(Stub(v1__models=models), "c")
    with pytest.raises(InputRefused, match="no /metrics"):
        engine.totals()
    text = "vllm:generation_tokens_total 3.0\n"
    engine = VllmEngine(Stub(v1__models=models, metrics=text, v1__completions={"choices": [{"text": "x"}]}))
    with pytest.raises(InputRefused, match="no token ids"):
        engine.answer([1], 2)
    assert engine.render([{"role": "user", "content": "x"}], {}) is None


def test_the_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(get_server_info=INFO)
    monkeypatch.setattr(endpoint, "Http", lambda options: stub)
    assert endpoint.connect(DoctorConfig(endpoint="http://x:1")).facts.engine == "sglang"
    stub.answers = {"/v1/models": {"data": [{"id": "a"}]}}
    assert endpoint.connect(DoctorConfig(endpoint="http://x:1")).facts.engine == "vllm"


def test_a_server_that_is_gone_or_says_no_is_named() -> None:
    http = endpoint.Http(DoctorConfig(endpoint="http://127.0.0.1:9/v1", timeout_seconds=1.0))
    with pytest.raises(InputRefused, match="127.0.0.1:9/v1/models: ConnectError"):
        http.find("/v1/models")


def test_vllm_is_told_which_tokens_may_be_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspec.doctor.vllm._SETTLE_SECONDS", 0.0)
    http = Stub(v1__models={"data": [{"id": "a"}]}, metrics="vllm:generation_tokens_total 3.0\n",
                v1__completions={"choices": [{"token_ids": [7, 7]}]})
    assert VllmEngine(http).answer([1], 2, (7,)).token_ids == (7, 7)
    assert http.asked[0][1]["allowed_token_ids"] == [7]
    VllmEngine(http).answer([1], 2)
    assert "allowed_token_ids" not in http.asked[1][1]
