"""What the closed loop decides, the run it makes, and the comparison that judges the successor."""

import json
import sys
from pathlib import Path
from typing import Any, Optional

import pytest

from deepspec.config.compose import compose_config
from deepspec.config.schema import Config
from deepspec.errors import ConfigError, InputRefused
from deepspec.evaluation.succession import DecodeOptions, compare_drafters
from deepspec.planning.jobs import check_job
from deepspec.planning.validate_serving import check_loop
from deepspec.stages.closed_loop import choose, paragraph, served, successor
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target

OPTIONS = DecodeOptions(temperature=1.0, batch_size=4, max_new_tokens=12, resamples=200, seed=0)


def with_loop(**values: Any) -> Config:
    config = Config()
    for key, value in values.items():
        setattr(config.loop, key, value)
    return config


@pytest.mark.parametrize("action, requests, expected", [
    ("none", None, "none"), ("recalibrate", None, "recalibrate"), ("train", "log", "train")])
def test_the_drift_report_decides(action: str, requests: Optional[str], expected: str) -> None:
    report = {"verdict": {"action": action, "reason": "because"}}
    assert choose(with_loop(requests=requests), report) == (expected, "because")
    assert choose(with_loop(action="train", requests="log"), report)[0] == "train"


def test_training_needs_requests() -> None:
    with pytest.raises(InputRefused, match="loop.requests names no log"):
        choose(with_loop(), {"verdict": {"action": "train", "reason": "tokens fell"}})
    assert choose(with_loop(requests="log"), None)[0] == "train"


def test_the_successors_run(tmp_path: Path) -> None:
    """The same options, its own folder, the requests as data, and this run's export as the start."""
    stored = ["+experiment=tiny", "run.name=now", "drafter.num_layers=1", "data.max_prompts=40",
              f"run.dir={tmp_path}/now", "loop.requests=log.jsonl", "loop.steps=7", "doctor.max_prompts=3"]
    after = successor(compose_config(stored), stored)
    assert after.run.name == "now-next" and after.run.dir == f"{tmp_path}/now-next"
    assert after.drafter.init_from == f"{tmp_path}/now/export" and after.drafter.num_layers == 1
    assert [source.kind for source in after.data.sources] == ["requests"] and after.data.sources[0].path == "log.jsonl"
    assert after.trainer.max_steps == 7
    assert after.data.max_length == compose_config(["+experiment=tiny"]).data.max_length
    written = json.loads((tmp_path / "now-next" / "overrides.json").read_text())
    assert not [text for text in written if text.startswith(("loop.", "doctor."))]
    assert compose_config(written) == after


def test_drafters_are_compared_on_the_same_prompts() -> None:
    target = tiny_target()
    drafter, other = tiny_drafter(target), tiny_drafter(target, seed=7)
    found = compare_drafters(target, drafter, other, prompts(9), OPTIONS)
    low, high = found["speedup_ci95"]
    assert found["acceptance"]["prompts"] == 9 and low <= found["speedup"] <= high
    for side in ("in_service", "successor"):
        values = found[side]
        assert values["latency_per_token_ms"] == pytest.approx(
            (values["draft_ms"] + values["verify_ms"]) / values["acceptance_length"])
    same = compare_drafters(target, drafter, drafter, prompts(9), OPTIONS)
    assert same["acceptance"]["effect"] == 0.0 and same["acceptance"]["p_value"] == 1.0
    with pytest.raises(InputRefused, match="two prompts"):
        compare_drafters(target, drafter, other, prompts(1), OPTIONS)


def test_a_server_command_that_ends_is_reported(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    config = with_loop(serve=f"{sys.executable} -c 'print(1)' {{drafter}}", endpoint="http://127.0.0.1:9")
    with pytest.raises(InputRefused, match="did not bring up a server at http://127.0.0.1:9"):
        with served(config, tmp_path / "export"):
            pass
    assert (tmp_path / "loop_server.log").read_text() == "1\n"
    with served(with_loop(), tmp_path / "export") as endpoint:
        assert endpoint is None


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loop.serve"):
        check_loop(with_loop(serve="vllm serve", endpoint="http://x:1"))
    with pytest.raises(ConfigError, match="Neither loop.records nor loop.requests"):
        check_job(with_loop(), "loop")
    with pytest.raises(ConfigError, match="loop.action=recalibrate needs loop.records"):
        check_job(with_loop(action="recalibrate", requests=str(tmp_path)), "loop")
    with pytest.raises(InputRefused, match="loop.requests='/nowhere' does not exist"):
        check_job(with_loop(requests="/nowhere"), "loop")


def test_the_paragraph_says_what_was_compared() -> None:
    target = tiny_target()
    found = compare_drafters(target, tiny_drafter(target), tiny_drafter(target, seed=7), prompts(6), OPTIONS)
    text = paragraph({"action": "train", "reason": "because", "comparison": found})
    assert text.startswith("Train: because.") and "paired difference" in text and "By Eq. 1" in text
