"""Which reference prompts a server's own length leaves."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspec.config.schema import Config
from deepspec.doctor.reference import read_prompts
from deepspec.errors import InputRefused
from tests.trained_drafter import write_prompts


def words(messages: Any, tools: Any) -> list[int]:
    return [1] * sum(len(message["content"].split()) for message in messages)


def test_prompts_that_do_not_fit_are_left_out_with_a_warning(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, renderer = Config(), SimpleNamespace(prompt_ids=words)
    config.doctor.prompts = str(write_prompts(tmp_path / "prompts.jsonl", [[5] * 4, [5] * 40, [5] * 6]))
    config.doctor.max_new_tokens, config.doctor.max_prompts = 8, 3
    with caplog.at_level(logging.WARNING):
        assert len(read_prompts(config, renderer, None)) == 3 and not caplog.records
        found = read_prompts(config, renderer, 20)
    assert [len(prompt.ids) for prompt in found] == [4, 6]
    assert "1 reference prompts are left out" in caplog.text and "do not fit the 20 tokens" in caplog.text
    with pytest.raises(InputRefused, match="within the server's 9 tokens .3 are too long.*max_model_len"):
        read_prompts(config, renderer, 9)
