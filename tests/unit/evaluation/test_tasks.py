"""Task scores: what counts as solved, their intervals, and the two ways of decoding against each other."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepspec.config.schema import BenchmarkConfig
from deepspec.decoding.types import DecodeResult
from deepspec.errors import InputRefused
from deepspec.evaluation import sandbox
from deepspec.evaluation.benchmarks import Conversation, load_benchmark
from deepspec.evaluation.metrics import AcceptanceCounts
from deepspec.evaluation.scoring import Task, final_answer, solves, task_of, to_number
from deepspec.evaluation.summary import Setting, Speed, describe
from deepspec.evaluation.tasks import paired_score, score_interval, solved, task_score
from deepspec.report.scores import score_table


@pytest.mark.parametrize("text, answer, right", [
    ("He has 3 + 4 apples.\nThe answer is 7.", "7", True),
    ("The answer is 1,234", "1234", True),
    ("So it is \\boxed{\\frac{3}{4}}", "0.75", True),
    ("first \\boxed{3}, no: \\boxed{12}", "12", True),
    ("step 1: 12\nstep 2: 5", "12", False),
    ("#### -18", "Natalia sold 18/2...\n#### -18", True),
    ("The answer is $42.00.", "42", True),
    ("answer: 41", "42", False),
    ("<think>the answer is 42</think>I do not know", "42", False),
    ("The answer is 0.333333", "1/3", True),
    ("The answer is 0.33", "1/3", False),
    ("", "3", False),
    ("Therefore Yes.", "Yes", True),
    ("Therefore:\nYes.", "Yes", True),
    ("The answer is No, because", "Yes", False),
    ("The answer is No, because", "No", True),
    ("The answer is .5", "0.5", True),
    ("The answer is .5", "5", False),
    ("so \\boxed{-\\frac{1}{2}}", "-0.5", True),
    ("so \\boxed{-\\frac{1}{2}}", "2", False),
    ("so \\boxed{\\text{Yes}}", "Yes", True),
    ("The answer is:\n12", "12", True),
    ("The answer is " + "1" * 5000, "1", False),  # more digits than Python turns into a number
])
def test_answers(text: str, answer: str, right: bool) -> None:
    assert solves(Task(answer=answer), text) is right


def test_numbers_and_results() -> None:
    assert to_number("1,000.5") == 1000.5 and to_number("3/0") is None and to_number("seven") is None
    assert final_answer("a\n\nlast line\n") == "last line"
    assert final_answer("an unclosed \\boxed{3") == "an unclosed \\boxed{3"


HUMAN_EVAL = {"prompt": "Write add.", "entry_point": "add", "code_prompt": "def add(a, b):\n",
              "test": "def check(f):\n    assert f(1, 2) == 3\n"}


@pytest.mark.parametrize("text, right", [
    ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", True),
    ("```python\ndef add(a, b):\n    return a - b\n```", False),
    ("```bash\npip install it\n```\nThen:\n```python3\ndef add(a, b):\n    return a + b\n```\n", True),
    ("    return a + b\n", True),  # the body alone, as HumanEval's prompts invite
    ("```python\ndef add(a, b):\n    return a +", False),
    ("```python\nimport sys\nsys.exit(1)\n```", False),
    ("```python\ndef add(a, b):\n    return 0\nimport sys\nsys.exit(0)\n```", False),  # before its tests
    ("```python\nimport os\ndef add(a, b):\n    os._exit(0)\n```", False),
    ("```python\ndef add(a, b):\n    while True: pass\n```", False),
])
def test_code_is_run_against_its_tests(text: str, right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_CPU_SECONDS", 2)  # of which one case uses all
    assert solves(task_of(HUMAN_EVAL), text) is right


def test_asserts_without_an_entry_point() -> None:
    task = task_of({"prompt": "p", "test_list": ["assert f(2) == 4", "assert f(3) == 9"]})
    assert solves(task, "```\ndef f(x):\n    return x * x\n```")
    assert not solves(task, "```\ndef f(x):\n    return 4\n```")


def results(answers: dict[str, str]) -> list[DecodeResult]:
    return [DecodeResult(name, "math", 3, tuple(text.encode()), "stop", (), 0.0) for name, text in answers.items()]


def test_the_last_answer_counts_and_code_only_when_asked() -> None:
    def conversation(name: str, turns: int, task: Task) -> Conversation:
        slots = tuple({"role": "assistant"} for _ in range(turns))
        return Conversation(name, "math", slots, task=task)

    rows = [conversation("b/1", 1, Task(answer="3")), conversation("b/2", 2, Task(answer="3")),
            conversation("b/3", 2, Task(answer="3")), Conversation("b/4", "math", ({"role": "assistant"},)),
            conversation("b/5", 1, Task(tests="assert True"))]
    given = results({"b/1#0": "3", "b/2#0": "3", "b/2#1": "4", "b/3#0": "3", "b/4#0": "3", "b/5#0": "x = 1"})

    def text(ids: tuple[int, ...]) -> str:
        return bytes(ids).decode()

    assert solved(rows, given, text, run_code=False) == {"b/1": True, "b/2": False}
    assert solved(rows, given, text, run_code=True)["b/5"] is True


def test_a_benchmark_with_answers(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "answer": 2}) + "\n" + json.dumps({"prompt": "hello"}) + "\n")
    rows = load_benchmark(BenchmarkConfig("b", str(path)), tmp_path).conversations
    assert rows[0].task == Task(answer="2") and rows[1].task is None
    path.write_text(json.dumps({"prompt": "1+1?", "answer": [2]}) + "\n")
    with pytest.raises(InputRefused, match=r"b.jsonl:1: the task cannot be scored .*\[2\]"):
        load_benchmark(BenchmarkConfig("b", str(path)), tmp_path)


def test_generated_tasks_have_answers_that_score(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="generated tasks need reasoning-gym")
    found = load_benchmark(BenchmarkConfig("g", "embedded_math", "math", 30), tmp_path)
    assert len(found.conversations) == 30 and found.domain == "math"
    for item in found.conversations:
        assert solves(item.task, f"so 1 and 2.\nThe answer is {item.task.answer}.")
        assert not solves(item.task, "The answer is 987654321.5")


def test_intervals_of_matched_pairs_hold_what_they_promise() -> None:
    """Two decoders with the same chance to solve each task: 95 % of the intervals hold 0, whatever the chance."""
    random = np.random.default_rng(0)
    for chance in (0.02, 0.3):
        inside = 0
        for _ in range(400):
            own = np.clip(random.normal(chance, 0.1, 80), 0, 1)
            one, two = ({str(i): bool(value) for i, value in enumerate(random.random(80) < own)} for _ in range(2))
            found = paired_score(one, two)
            inside += found.within_noise
        assert inside / 400 > 0.92  # three standard deviations below 0.95
    lost = paired_score({str(i): False for i in range(80)}, {str(i): i % 4 == 0 for i in range(80)})
    assert not lost.within_noise and lost.difference == -0.25 and lost.lost == 20 and lost.p_value < 1e-5
    same = paired_score({"a": True, "b": False}, {"a": True, "b": False, "c": True})
    assert same.prompts == 2 and same.p_value == 1.0 and same.ci95[0] < 0 < same.ci95[1]
    assert paired_score({"a": True}, {"b": True}) is None and score_interval(0, 0) is None
    low, high = score_interval(0, 50)
    assert low == 0.0 and 0.05 < high < 0.1


def setting(decoding: str, right: dict[str, bool]) -> Setting:
    found = Setting(1.0, decoding, 8)
    found.add("b", "math", AcceptanceCounts.of([], 2), Speed(), right)
    found.add("c", "math", AcceptanceCounts.of([], 2), Speed())
    return found


def test_the_file_and_the_report_have_them() -> None:
    alone, fixed = setting("none", {"b/1": True, "b/2": False}), setting("fixed", {"b/1": True, "b/2": True})
    found = describe(fixed, alone, resamples=0, seed=0)
    score = found["benchmarks"]["b"]["task_score"]
    assert score["score"] == 1.0 and score["target_only_score"] == 0.5 and score["difference"] == 0.5
    assert score["gained"] == 1 and score["within_noise"] and "task_score" not in found["benchmarks"]["c"]
    assert found["macro"]["task_score"] == score == found["domains"]["math"]["task_score"]
    own = describe(alone, alone, resamples=0, seed=0)["benchmarks"]["b"]["task_score"]
    assert own["score"] == 0.5 and "difference" not in own
    html = score_table({"settings": {"t1-fixed": found}})
    assert "50.0%" in html and "+50.0%" in html and ">yes<" in html
    assert score_table({"settings": {"t1-fixed": {"benchmarks": {}}}}) == "" and task_score({}, None) is None
