"""Part files of several ranks, and answers made in this process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_data import END, MASK, save_target, tiny_tokenizer

from deepspec.config.schema import TargetConfig
from deepspec.data import regenerate
from deepspec.data.dialogue import AnswerLimits, Dialogue, TurnRefused, as_message, join_reasoning
from deepspec.data.parts import PartWriter, answered, join_parts, mine, prepare_parts
from deepspec.data.prompt_rows import conversation
from deepspec.data.prompts import PromptRow
from deepspec.data.rendering import Renderer
from deepspec.data.responses import ResponseRow, Turn, read_responses
from deepspec.targets.generate import GenerateResult
from deepspec.targets.load import load_target
from deepspec.targets.sampling import Sampling


def prompt(name: str, *turns: str) -> PromptRow:
    return PromptRow(name, "chat", "train", "own", tuple(conversation({"turns": list(turns or (name,))})[0]))


def answer(row: PromptRow, reason: str = "stop") -> ResponseRow:
    return ResponseRow(row.id, row.domain, row.split, row.messages, (Turn((1,), (5, 6), reason, "x"),))


def test_joining_gives_the_same_bytes_for_any_number_of_ranks(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(10)]
    for world in (1, 3):
        folder = tmp_path / str(world)
        for rank in reversed(range(world)):
            prepare_parts(folder, rank, world)
            with PartWriter(folder, rank) as writer:
                for row in reversed(list(mine(rows, set(), rank, world))):
                    writer.answer(answer(row)) if row.id != "4" else writer.fail("4", "bad")
        assert join_parts(folder, rows, drop_truncated=False)["failed"] == 1
    for name in ("responses.jsonl", "errors.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()


def test_a_resume_on_fewer_ranks_finds_every_part(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(9)]
    for rank in range(3):
        prepare_parts(tmp_path, rank, 3)
        with PartWriter(tmp_path, rank) as writer:
            for row in list(mine(rows, set(), rank, 3))[:2]:
                writer.answer(answer(row))
            writer.fail(rows[6 + rank].id, "first try")
    torn = tmp_path / "parts" / "part-00002.jsonl"
    torn.write_bytes(torn.read_bytes()[:-3])
    prepare_parts(tmp_path, 0, 1)
    assert torn.read_bytes().endswith(b"\n")
    todo = list(mine(rows, answered(tmp_path), 0, 1))
    assert [row.id for row in todo] == ["5", "6", "7", "8"]
    with PartWriter(tmp_path, 0) as writer:
        for row in todo:
            writer.answer(answer(row))
    counts = join_parts(tmp_path, rows, drop_truncated=False)
    assert (counts["rows"], counts["failed"], counts["missing"]) == (9, 0, 0)
    assert [row.id for row in read_responses(tmp_path)] == [row.id for row in rows]


def test_rows_that_were_not_tried_and_truncated_ones_are_counted(tmp_path: Path) -> None:
    rows = [prompt(str(index)) for index in range(4)]
    prepare_parts(tmp_path)
    with PartWriter(tmp_path) as writer:
        writer.answer(answer(rows[0]))
        writer.answer(answer(rows[1], "length"))
        writer.fail("2", "bad")
    kept = join_parts(tmp_path, rows, drop_truncated=False)
    assert (kept["rows"], kept["truncated"], kept["missing"], kept["failed"]) == (2, 1, 1, 1)
    dropped = join_parts(tmp_path, rows, drop_truncated=True)
    assert (dropped["rows"], dropped["dropped_truncated"]) == (1, 1)


def test_split_and_domain_are_those_of_the_prompts_now(tmp_path: Path) -> None:
    row = prompt("a")
    prepare_parts(tmp_path)
    with PartWriter(tmp_path) as writer:
        writer.answer(answer(row))
    join_parts(tmp_path, [PromptRow("a", "math", "held_out", "own", row.messages)], drop_truncated=False)
    (found,) = read_responses(tmp_path)
    assert (found.domain, found.split) == ("math", "held_out")


def test_an_empty_answer_is_refused() -> None:
    renderer = Renderer(tiny_tokenizer())
    dialogue = Dialogue(prompt("a"), AnswerLimits(8, 100, MASK))
    for ids, text in (((END,), ""), ((5, END), " \n"), ((), "")):
        with pytest.raises(TurnRefused, match="empty answer"):
            dialogue.add(Turn((1,), ids, "stop", text), renderer)
    assert dialogue.turns == []


def test_reasoning_travels_apart_from_content() -> None:
    assert as_message("a") == {"role": "assistant", "content": "a"}
    assert as_message("<think>\nr\n</think>\n\na") == {"role": "assistant", "content": "a", "reasoning_content": "r"}
    assert join_reasoning("a", "") == ("a", False)
    assert join_reasoning("r</think>a", "") == ("<think>r</think>a", True)
    assert join_reasoning("", "r", cut=True) == ("<think>r", False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = save_target(tmp_path_factory.mktemp("target"))
    config = TargetConfig(name="tiny", path=str(folder), dtype="float32", feature_layers=[0, 2], mask_token_id=MASK)
    return load_target(config, device="cpu", cache_dir=folder)


def test_answers_in_process_do_not_depend_on_the_split_over_ranks(tmp_path: Path, target: object) -> None:
    renderer = Renderer(target.tokenizer, False)
    rows = [prompt(str(index), *["hello"] * (1 + index % 2), "fox") for index in range(7)] + [prompt("long", "x" * 200)]
    reported = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        for rank in range(world):
            prepare_parts(folder, rank, world)
            with PartWriter(folder, rank) as writer:
                regenerate.answer_in_process(
                    target, renderer, list(mine(rows, set(), rank, world)), writer, limits=AnswerLimits(6, 120, None),
                    sampling=Sampling(1.0, 1.0, 0, 7), batch_size=3,
                    on_row=lambda tokens, failed=False: reported.append(tokens),
                )
        join_parts(folder, rows, drop_truncated=False)
    assert (tmp_path / "1" / "responses.jsonl").read_bytes() == (tmp_path / "2" / "responses.jsonl").read_bytes()
    assert len(reported) == 16
    found = list(read_responses(tmp_path / "1"))
    assert "long" not in {row.id for row in found} and len(found) >= 5
    for row in found:
        for turn in row.turns:
            assert (turn.response_ids[-1] in (END, 0)) == (turn.finish_reason == "stop")
            assert turn.finish_reason == "stop" or len(turn.response_ids) == 6
        ids, _ = Dialogue(prompt(row.id, "hello"), AnswerLimits(6, 120)).next_prompt(renderer)
        assert row.turns[0].prompt_ids == tuple(ids)


def test_a_conversation_goes_on_with_the_answers_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a target that says what it is told to."""
    renderer = Renderer(tiny_tokenizer())
    spoken = {"a": "one", "a#1": "two", "b": "cut"}

    def generate(_: object, requests: list, *__: object) -> list[GenerateResult]:
        results = []
        for request in requests:
            reason = "length" if request.id == "b" else "stop"
            ids = (*renderer.text_ids(spoken[request.id]), *([END] if reason == "stop" else []))
            results.append(GenerateResult(request.id, ids, reason))
        return results

    monkeypatch.setattr(regenerate, "generate", generate)
    fake = SimpleNamespace(spec=SimpleNamespace(eos_token_ids=(END, 0)))
    rows = [prompt("a", "x", "y"), prompt("b", "x", "y")]
    prepare_parts(tmp_path)
    with PartWriter(tmp_path) as writer:
        regenerate.answer_in_process(fake, renderer, rows, writer, limits=AnswerLimits(9, 400, MASK),
                                     sampling=Sampling(), batch_size=2)
    join_parts(tmp_path, rows, drop_truncated=False)
    first, second = read_responses(tmp_path)
    assert [turn.text for turn in first.turns] == ["one", "two"]
    history = first.turns[0].prompt_ids + first.turns[0].response_ids
    assert first.turns[1].prompt_ids[:len(history)] == history
    assert [turn.finish_reason for turn in second.turns] == ["length"]
