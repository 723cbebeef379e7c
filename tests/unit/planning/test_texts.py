"""The bytes of prompts and answers that are planned are, within 5 %, those that are written."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from deepspec.config.schema import Config, SourceConfig
from deepspec.data import collect as collecting
from deepspec.data.jsonl import dump_row
from deepspec.data.responses import ResponseRow, Turn
from deepspec.errors import InputRefused
from deepspec.planning import estimate, preflight, texts
from deepspec.planning.plan import render
from deepspec.planning.samples import SampleLength

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()


def write_rows(path: Path, rows: int, kind: str = "jsonl") -> None:
    chance = random.Random(3)
    with open(path, "w", encoding="utf-8") as handle:
        for index in range(rows):
            text = " ".join(chance.choice(WORDS) + str(chance.randrange(10**6)) for _ in range(chance.randint(5, 60)))
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": text}, {"role": "assistant", "content": "an answer " * 20},
                {"role": "user", "content": "😀 go on"},
            ]
            row: dict[str, Any] = {"messages": messages, "id": f"row-{index}"}
            if index % 10 == 0:
                row = {"messages": []}  # refused
            handle.write(json.dumps({"body": row} if kind == "requests" else row, ensure_ascii=False) + "\n")


def collected(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(most bytes of temporary files, bytes of prompts) of the stage prompts."""
    seen, remove = [0], shutil.rmtree

    def measured(path: Path, **options: Any) -> None:
        seen.append(sum(item.stat().st_size for item in Path(path).glob("*") if item.is_file()))
        remove(path, **options)

    monkeypatch.setattr(collecting.shutil, "rmtree", measured)
    collecting.collect(config.data, 0, folder)
    return max(seen), (folder / "prompts.jsonl").stat().st_size


@pytest.mark.parametrize("kind", ["jsonl", "requests"])
def test_the_pool_is_counted(tmp_path: Path, composed: Callable[..., Config], monkeypatch: pytest.MonkeyPatch,
                             kind: str) -> None:
    write_rows(tmp_path / "p.jsonl", 1500, kind)
    config = composed("+experiment=tiny", f"run.data_root={tmp_path / 'data'}")
    config.data = replace(config.data, max_prompts=300, sources=[SourceConfig("own", kind, str(tmp_path / "p.jsonl"))],
                          redaction=None)
    planned = texts.text_bytes(config, 300, SampleLength(100, 50, ""))
    pool, prompts = collected(config, tmp_path / "out", monkeypatch)
    assert planned.pool > 3 * planned.prompts
    assert abs(planned.pool / pool - 1) < 0.05
    assert abs(planned.prompts / prompts - 1) < 0.05


def test_embedded_prompts_are_counted(tmp_path: Path, composed: Callable[..., Config],
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    config = composed("+experiment=tiny")
    config.data.max_prompts = 240
    planned = texts.text_bytes(config, 240, SampleLength(100, 50, ""))
    pool, prompts = collected(config, tmp_path / "out", monkeypatch)
    assert abs(planned.pool / pool - 1) < 0.05 and abs(planned.prompts / prompts - 1) < 0.05


def test_answers_are_counted(composed: Callable[..., Config]) -> None:
    """As far as they can be without a tokenizer: frequent tokens have small ids."""
    config = composed("+experiment=tiny")
    chance, question = random.Random(0), "a question of some words that somebody asks"
    ids = [tuple(int(10 ** chance.uniform(1.8, 3.32)) for _ in range(count)) for count in (80, 60)]
    turn = Turn(ids[0], ids[1], "stop", "word " * round(60 * 2.85 / 5))
    messages = ({"role": "user", "content": question}, {"role": "assistant"})
    written = len(dump_row(ResponseRow("0" * 20, "code", "train", messages, (turn,)).to_json()))
    prompt = {"id": "0" * 20, "domain": "code", "messages": messages}
    planned = len(dump_row(prompt)) + texts.answer_bytes(config, SampleLength(140, 60, ""))
    assert abs(planned / written - 1) < 0.1


def test_the_most_at_a_time() -> None:
    sizes = texts.TextBytes(pool=1000, prompts=10, responses=50)
    assert texts.peak(sizes, 5, {"prompts", "responses", "features"}) == 1010
    assert texts.peak(sizes, 5000, {"prompts", "responses", "features"}) == 5060
    assert texts.peak(sizes, 7, {"features"}) == 7
    assert texts.peak(sizes, 0, {"responses"}) == 50


def test_a_pool_that_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path, composed: Callable[..., Config],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "p.jsonl", 500)
    config = composed("+experiment=tiny", "data=files", f"data.sources.0.path={tmp_path / 'p.jsonl'}",
                      "data.decontaminate_benchmarks=false", f"run.data_root={tmp_path / 'data'}",
                      f"run.dir={tmp_path / 'run'}", "stages=[prompts]", "data.max_prompts=20")
    plan = estimate.make_plan(config)
    assert plan.disks[0].need > 400 * 512 and "temporary files" in render(plan)
    monkeypatch.setattr(estimate, "free_bytes", lambda path: 100_000)
    with pytest.raises(InputRefused, match="Not enough disk .*temporary"):
        preflight.preflight(config, ["prompts"])
