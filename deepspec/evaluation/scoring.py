"""Whether an answer solves its task: numbers, short texts, and code that is run against tests.

Scores compare the target with itself, alone and with a drafter. They are no leaderboard: extraction is the same for
both sides, and what it misses it misses on both.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Mapping, Optional

from deepspec.evaluation.sandbox import passes

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)(?:\s*/\s*\d+)?")
_FRACTION = re.compile(r"(-?)\s*\\[dt]?frac\s*\{(-?\d+)\}\s*\{(\d+)\}")
_TEXT = re.compile(r"\\(?:text(?:bf|rm)?|mathrm|mathbf)\s*\{([^{}]*)\}")
_MARK = re.compile(r"(?:####|(?:final\s+)?answer\s*(?:is)?\s*:?)\s*", re.IGNORECASE)
_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_THOUGHT = "</think>"
_TOLERANCE = Fraction(1, 10 ** 6)  # relative, of numbers that are written as decimals
_LONGEST = 400  # characters of a number: a digit repeated for ever is none, and Python refuses to read it


@dataclass(frozen=True)
class Task:
    """What a solution is: a reference ``answer``, or ``tests`` of a function ``entry_point`` with its ``prefix``."""

    answer: Optional[str] = None
    tests: Optional[str] = None
    entry_point: Optional[str] = None
    prefix: str = ""  # code that an answer may leave out: the function's head

    @property
    def is_code(self) -> bool:
        """Whether scoring means running what the model wrote."""
        return self.tests is not None


def task_of(row: Mapping[str, Any]) -> Optional[Task]:
    """The task of a benchmark row, None for a plain prompt. Raises ValueError for fields of a wrong type.

    ``answer`` (text or number; of GSM8K's worked ones, what stands behind ``####``), or ``test`` / ``test_list`` with
    ``entry_point`` and ``prompt`` as HumanEval and MBPP have them.
    """
    tests = row.get("test", row.get("test_list"))
    if tests is not None:
        if isinstance(tests, list) and all(isinstance(line, str) for line in tests):
            tests = "\n".join(tests)
        entry = row.get("entry_point")
        if not isinstance(tests, str) or not (entry is None or isinstance(entry, str)):
            raise ValueError("test is code (test_list a list of it), entry_point a name")
        code = row.get("code_prompt", "")
        return Task(tests=tests, entry_point=entry, prefix=code if isinstance(code, str) else "")
    answer = row.get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
        raise ValueError(f"answer is text or a number, not {answer!r}")
    return Task(answer=str(answer))


def to_number(text: str) -> Optional[Fraction]:
    """The number that ``text`` is, with thousands separators, as fraction, as LaTeX fraction; None for anything else.
    """
    if len(text) > _LONGEST:
        return None
    bare = text.strip().strip("$").strip().rstrip(".").replace("\\$", "").replace("\\%", "").strip("$% ")
    latex = _FRACTION.fullmatch(bare)
    if latex:
        value = Fraction(int(latex[2]), int(latex[3])) if int(latex[3]) else None
        return value if value is None or not latex[1] else -value
    if not _NUMBER.fullmatch(bare):
        return None
    top, _, bottom = bare.replace(",", "").partition("/")
    below = Fraction(bottom.strip()) if bottom else Fraction(1)
    return Fraction(top.strip()) / below if below else None


def _boxed(text: str) -> Optional[str]:
    """Content of the last complete ``\\boxed{..}``."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return None


def final_answer(text: str) -> str:
    """What ``text`` gives as its result: the last box, else what follows the last "answer" or ``####`` on its line,
    else its last line that is not empty. Reasoning in think tags is left out."""
    text = text.rpartition(_THOUGHT)[2]
    box = _boxed(text)
    if box is not None:
        return _TEXT.sub(r"\1", box).strip()
    marks = list(_MARK.finditer(text))
    if marks:
        rest = text[marks[-1].end():].strip()
        if rest:
            return rest.splitlines()[0].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _same_number(wanted: Fraction, text: str) -> bool:
    """Whether the result of ``text`` is the number: as it stands, or the last number in it."""
    final = final_answer(text)
    found = to_number(final)
    if found is None:
        numbers = [value for value in map(to_number, _NUMBER.findall(final.replace("**", ""))) if value is not None]
        found = numbers[-1] if numbers else None
    return found is not None and abs(found - wanted) <= _TOLERANCE * max(Fraction(1), abs(wanted))


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s./+-]", "", text.casefold()).split()).rstrip(".")


def code_of(text: str) -> str:
    """The code of an answer: its fenced blocks of Python or of no language, or all of it where there is none."""
    found = _FENCE.findall(text.rpartition(_THOUGHT)[2])
    blocks = [block for language, block in found if language.lower() in _PYTHON]
    return "\n".join(blocks) if blocks else text


def _program(task: Task, text: str) -> str:
    code = code_of(text)
    if task.entry_point and not re.search(rf"def\s+{re.escape(task.entry_point)}\b", code):
        code = task.prefix + code
    call = f"\ncheck({task.entry_point})\n" if task.entry_point and "def check(" in str(task.tests) else "\n"
    return f"{code}\n{task.tests}{call}"


def solves(task: Task, text: str) -> bool:
    """Whether the answer ``text`` solves ``task``. Code is run (sandbox.py): call it only where that was allowed."""
    if task.is_code:
        return passes(_program(task, text))
    reference = str(task.answer)
    wanted = to_number(final_answer(reference) if "####" in reference or "\\boxed" in reference else reference)
    if wanted is not None:
        return _same_number(wanted, text)
    # Yes or no, a name, a day: the result itself, or the sentence that ends with it.
    expected, final = _plain(reference), _plain(final_answer(text))
    return bool(expected) and (final == expected or final.endswith(f" {expected}") or final.startswith(f"{expected} "))
