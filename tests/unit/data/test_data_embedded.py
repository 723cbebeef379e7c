"""Prompts that come with the project."""

import importlib
import logging

import pytest
from gathered import gather

from deepspec.config.schema import SourceConfig
from deepspec.data.embedded import embedded_prompts
from deepspec.data.embedded_chat import WRITTEN
from deepspec.data.prompt_rows import conversation
from deepspec.errors import ConfigError, InputRefused


@pytest.mark.parametrize("kind,limit", [("chat", 200), ("code", 60), ("math", 60)])
def test_more_prompts_begin_with_the_same(kind: str, limit: int) -> None:
    if kind == "math":
        pytest.importorskip("reasoning_gym")
    few, many = embedded_prompts(kind, limit // 2, 0), embedded_prompts(kind, limit, 0)
    assert len(many) == limit
    assert many[:limit // 2] == few
    assert embedded_prompts(kind, limit, 1) != many
    assert len({str(row) for row in many}) == limit
    for row in many:
        conversation(row)


def test_written_chat_is_varied() -> None:
    assert len(WRITTEN) >= 60
    assert len({turns[0].split()[0] for turns in WRITTEN}) >= 15
    assert sum(len(turns) > 1 for turns in WRITTEN) >= 10
    assert len(set(WRITTEN)) == len(WRITTEN)


def test_code_tasks_are_read_from_documentation() -> None:
    texts = [row["prompt"] for row in embedded_prompts("code", 300, 0)]
    assert all("def " in text or "`" in text for text in texts)
    assert all(60 < len(text) < 1500 for text in texts)
    assert sum(text.startswith("Write a Python function") for text in texts) > 20


def test_math_asks_for_the_way_not_only_the_result() -> None:
    pytest.importorskip("reasoning_gym")
    texts = [row["prompt"] for row in embedded_prompts("math", 300, 0)]
    for bare in ("Give only", "only reply", "Only reply", "Return only", "Respond only", "final answer"):
        assert not [text for text in texts if bare in text]
    assert sum("step" in text for text in texts) > 60


def test_asking_for_more_than_there_is_gives_all_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rows = embedded_prompts("chat", 10**6, 0)
    assert len(rows) == len(embedded_prompts("chat", None, 0)) > 1000
    assert any("1000000 were asked for, there are" in message for message in caplog.messages)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(InputRefused, match="pip install reasoning-gym"):
        embedded_prompts("math", 1, 0)
    with pytest.raises(InputRefused, match="pip install champ-dataset"):
        embedded_prompts("champ", 1, 0)


def test_kinds_are_checked() -> None:
    with pytest.raises(ConfigError, match="'poems'"):
        embedded_prompts("poems", 1, 0)
    with pytest.raises(ConfigError, match="cap"):
        embedded_prompts("math", None, 0)


def test_competition_problems_have_their_own_ids() -> None:
    pytest.importorskip("champ_dataset")
    rows = embedded_prompts("champ", None, 0)
    assert len(rows) == 270
    assert len({row["id"] for row in rows}) == 270


def test_embedded_sources_grow_without_losing_prompts() -> None:
    def ids(count: int) -> set[str]:
        sources = [SourceConfig(name=kind, kind="embedded", path=kind, domain=kind) for kind in ("code", "chat")]
        return {row.id for row in gather(*sources, max_prompts=count)[0]}

    assert ids(40) < ids(90)
