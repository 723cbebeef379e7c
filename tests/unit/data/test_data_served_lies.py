"""Servers of hidden states whose replies are no hidden states at all: one sample is set aside, nothing of ours goes."""

# flake8: noqa: F811

from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from fake_server import FakeServer
from hidden_state_server import TinyEngine, sglang, vllm
from safetensors.torch import save_file
from test_data_served import LAYERS, asked_of, config, engine, files, of_row, target  # noqa: F401

from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused, UserError
from deepspec.stages import features
from deepspec.stages.served import served_target
from deepspec.targets.head import load_head

Change = Callable[[dict[str, Any]], Any]


def choice(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["reply"]["choices"][0]
    return found


def aside(asked: Config) -> dict[str, str]:
    """Reasons by sample."""
    return {row["sample_id"]: row["reason"] for path in paths.features_dir(asked).glob("quarantine-*.jsonl")
            for _, row in read_rows(path)}


VLLM_LIES: dict[str, Change] = {
    "a list": lambda made: made.update(reply=[1, 2]),
    "a choice that is text": lambda made: made["reply"].update(choices=["x"]),
    "no choice": lambda made: made["reply"].update(choices=[None]),
    "parameters that are a list": lambda made: made["reply"].update(kv_transfer_params=[1]),
    "an echo that is a number": lambda made: choice(made).update(prompt_token_ids=7),
    "an echo of text": lambda made: choice(made).update(prompt_token_ids="x"),
    "stored ids that are a number": lambda made: made.update(token_ids=torch.tensor(3)),
    "stored ids in two dimensions": lambda made: made.update(token_ids=made["token_ids"][None]),
    "a token beyond the vocabulary": lambda made: choice(made).update(token_ids=[10**6]),
    "a token beyond int64": lambda made: choice(made).update(token_ids=[10**30]),
    "a token below zero": lambda made: choice(made).update(token_ids=[-1]),
    "log-probabilities that are a list": lambda made: choice(made).update(logprobs=[1]),
    "a log-probability that is no number": lambda made: choice(made).update(
        logprobs={"token_logprobs": [float("nan")]}),
    "a log-probability that is text": lambda made: choice(made).update(logprobs={"token_logprobs": ["x"]}),
    "states without a dimension": lambda made: made.update(states=torch.tensor(1.0)),
    "whole numbers": lambda made: made.update(states=made["states"].int()),
    "complex numbers": lambda made: made.update(states=made["states"].to(torch.complex64)),
    "no tokens": lambda made: made.update(states=made["states"][:0]),
}


@pytest.mark.parametrize("lie", VLLM_LIES.values(), ids=VLLM_LIES.keys())
def test_one_reply_of_vllm_that_is_none(config: Config, engine: TinyEngine, files: Path, lie: Change) -> None:
    bad = of_row(config, 8)

    def only_that(ids: list[int], made: dict[str, Any]) -> Any:
        return lie(made) if ids == bad else None

    with FakeServer(vllm(engine, files, LAYERS, only_that)) as server:
        asked = asked_of(config, server, concurrency=1)
        features.run(asked)
    assert list(aside(asked)) == ["p8"]


def test_no_number_reaches_training_from_servers_without_a_store(config: Config, engine: TinyEngine,
                                                                 files: Path) -> None:
    bad = of_row(config, 8)

    def lie(ids: list[int], made: dict[str, Any]) -> None:
        if ids == bad:
            made["states"][4, 1, 7] = float("inf")

    with FakeServer(vllm(engine, files, LAYERS, lie)) as server:
        asked = asked_of(config, server, store=False)
        head = load_head(asked.target, device="cpu", cache_dir=paths.model_cache(asked))
        with served_target(asked, head) as served:
            good = of_row(config, 7)
            assert served.encode(torch.tensor(good), [len(good)]).features.isfinite().all()
            with pytest.raises(UserError, match="36 tokens.*layer 2: value inf at token 4, channel 7"):
                served.encode(torch.tensor(good + bad), [len(good), len(bad)])


def states_of(made: dict[str, Any]) -> list[Any]:
    found: list[Any] = made["reply"]["meta_info"]["hidden_states"]
    return found


SGLANG_LIES: dict[str, Change] = {
    "a list": lambda made: made.update(reply=[1, 2]),
    "a list within": lambda made: made["reply"].update(meta_info=[1]),
    "text": lambda made: made["reply"]["meta_info"].update(hidden_states="x"),
    "one number": lambda made: made["reply"]["meta_info"].update(hidden_states=[1.0]),
    "a number": lambda made: made["reply"]["meta_info"].update(hidden_states=1.0),
    "an object": lambda made: made["reply"]["meta_info"].update(hidden_states={"a": 1}),
    "rows of other lengths": lambda made: states_of(made)[0].append([1.0]),
    "parts of other widths": lambda made: states_of(made).append([[1.0, 2.0]]),
    "a part too deep": lambda made: states_of(made).__setitem__(0, [states_of(made)[0]]),
    "nulls": lambda made: states_of(made)[0].__setitem__(0, [None] * 64),
    "a number beyond float32": lambda made: states_of(made)[0][20].__setitem__(0, 10**60),
}


@pytest.mark.parametrize("lie", SGLANG_LIES.values(), ids=SGLANG_LIES.keys())
@pytest.mark.parametrize("which", ["layers", "last"])
def test_one_reply_of_sglang_that_is_none(config: Config, engine: TinyEngine, lie: Change, which: str) -> None:
    bad = of_row(config, 8)

    def only_that(ids: list[int], made: dict[str, Any]) -> Any:
        return lie(made) if ids == bad else None

    spoil = {which: only_that}
    with FakeServer(sglang(engine, [0, 2], spoil.get("layers"))) as layers, \
            FakeServer(sglang(engine, None, spoil.get("last"))) as last:
        asked = asked_of(config, layers, engine="sglang", last_servers=[last.url], concurrency=1)
        features.run(asked)
    assert list(aside(asked)) == ["p8"]


@pytest.mark.parametrize("entries", [[[]], [None], "x", [1], [[None]], [[-1.0, 10**6, None]]])
def test_log_probabilities_of_sglang_that_are_none(config: Config, engine: TinyEngine, entries: Any) -> None:
    bad = of_row(config, 8)

    def lie(ids: list[int], made: dict[str, Any]) -> None:
        if ids == bad:
            made["reply"]["meta_info"].update(input_token_logprobs=entries, output_token_logprobs=entries)

    with FakeServer(sglang(engine, [0, 2])) as layers, FakeServer(sglang(engine, None, lie)) as last:
        asked = asked_of(config, layers, engine="sglang", last_servers=[last.url], concurrency=1)
        features.run(asked)
    assert list(aside(asked)) == ["p8"]


@pytest.mark.parametrize("content", ["text", "weights"])
@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_is_not_the_engines_is_never_deleted(config: Config, engine: TinyEngine, files: Path,
                                                         tmp_path: Path, content: str, first: bool) -> None:
    mine = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, mine) if content == "weights" else mine.write_text("mine")
    bad = of_row(config, 8)

    def lie(ids: list[int], made: dict[str, Any]) -> Any:
        if first or ids == bad:
            made["reply"]["kv_transfer_params"]["hidden_states_path"] = str(mine)
            return made["reply"]
        return None

    with FakeServer(vllm(engine, files, LAYERS, lie)) as server:
        asked = asked_of(config, server, concurrency=1)
        if first:
            with pytest.raises(InputRefused, match="model.safetensors"):
                features.run(asked)
        else:
            features.run(asked)
            assert "model.safetensors" in aside(asked)["p8"]
    assert mine.exists()
