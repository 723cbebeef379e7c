"""Procedural mathematics and logic (reasoning-gym), competition problems (champ-dataset): both optional packages."""

import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Iterator

from deepspec.errors import InputRefused

# Algebra, arithmetic, number theory, geometry, probability, word problems and logic whose items are short and quick.
TASKS: tuple[str, ...] = (
    "simple_equations", "gsm_symbolic", "simple_geometry", "gcd", "chain_sum", "syllogism",
    "polynomial_equations", "fraction_simplification", "knights_knaves", "prime_factorization", "advanced_geometry",
    "time_intervals", "number_sequence", "leg_counting", "lcm", "basic_arithmetic", "family_relationships",
    "polynomial_multiplication", "calendar_arithmetic", "coin_flip", "complex_arithmetic", "base_conversion",
    "simple_integration", "aiw", "products", "decimal_chain_sum",
)
_ITEMS_PER_TASK = 100_000  # some generators draw their whole plan up front
# The generators ask for a bare result to make grading easy; a drafter needs the reasoning to be written out.
_BARE = re.compile(
    r"(?:Give only|Give the result|Only reply|Return only|Do not give the units|Do not include units|Reply only|"
    r"Please follow|When performing calculations|In solving equations|For all geometry problems|"
    r"Respond only|Reply with|Answer with|\(Answer Yes|\(Format your answer|Final answer format|Answer in ).*",
    re.DOTALL,
)
_STATE = re.compile(r"^State the final answer to the following arithmetic problem:")
_CLOSINGS = (
    "Show your work.", "Explain every step.", "Think step by step, then state the answer.",
    "How do you get there?", "Write out the solution so that a pupil can follow it.", "",
)
# A result that is one number, so that it can be compared without the generators' own, stricter forms.
_SCORED = ("gsm_symbolic", "gcd", "lcm", "leg_counting", "chain_sum", "basic_arithmetic", "products",
           "simple_equations", "number_sequence", "aiw")
_SCORED_SEED = 1_000_003
_SCORED_CLOSING = "Think step by step, then end with: The answer is NUMBER."


def math_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Millions: one item of each task in turn. Raises InputRefused when reasoning-gym is missing."""
    # The import takes seconds and is of no use to runs that bring their own prompts.
    gym = _require("reasoning_gym", "reasoning-gym")
    datasets = [gym.create_dataset(name, seed=seed, size=_ITEMS_PER_TASK) for name in TASKS]
    seen = set()
    for index in range(_ITEMS_PER_TASK):
        for position, dataset in enumerate(datasets):
            question = _open_ended(dataset[index]["question"])
            closing = _CLOSINGS[(index + position) % len(_CLOSINGS)]
            if question not in seen:
                seen.add(question)
                yield {"prompt": f"{question}\n{closing}".strip()}


def scored_math(count: int) -> list[dict[str, Any]]:
    """``count`` rows ``{"prompt", "answer"}`` of the tasks whose result is one number, the same ones every time.

    Their seed is none that ``math_prompts`` is given in practice. Raises InputRefused when reasoning-gym is missing.
    """
    gym = _require("reasoning_gym", "reasoning-gym")
    datasets = [gym.create_dataset(name, seed=_SCORED_SEED, size=-(-count // len(_SCORED))) for name in _SCORED]
    rows = []
    for place in range(count):
        item = datasets[place % len(datasets)][place // len(datasets)]
        rows.append({"prompt": f"{_open_ended(item['question'])}\n{_SCORED_CLOSING}", "answer": item["answer"]})
    return rows


def _open_ended(question: str) -> str:
    shorter = _BARE.sub("", question).strip()
    if len(shorter) < 12:  # the task itself stood behind the instruction
        shorter = question.strip()
    return _STATE.sub("Work out:", shorter)


def champ_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """The problems of CHAMP, in the order of their names; ``seed`` is not used."""
    package = _require("champ_dataset", "champ-dataset")
    for name, text in _champ_texts(str(Path(package.__file__).parent)):
        yield {"id": f"champ-{name}", "prompt": text}


@cache
def _champ_texts(folder: str) -> tuple[tuple[str, str], ...]:
    with open(Path(folder) / "dataset_files" / "v0.json", encoding="utf-8") as handle:
        problems = json.load(handle)["problems"]
    return tuple(sorted((name, problem["_text"]) for name, problem in problems.items()))


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputRefused(
            f"Embedded prompts need the package {package} ({error}). Install it with: pip install {package}"
        ) from None
