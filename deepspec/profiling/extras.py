"""What serving needs besides rounds: prompts, and the target without a drafter at its side. Kept in sps.json."""

import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepspec.config.schema import ProfileConfig
from deepspec.errors import InputRefused

IN_PROCESS = "deepspec in process"  # engine of a profile of our own decoder
_EXTRA_SAMPLES = 3  # of each, at least


@dataclass(frozen=True)
class PrefillCell:
    """A prompt of ``tokens`` tokens fed in one request; medians in ms."""

    tokens: int
    n: int
    alone_ms: float  # the target's forward and the first token
    drafting_ms: float  # with its features captured and projected into the drafter's context


class ExtrasRunner(Protocol):
    """Something that can run plain rounds and prompts."""

    def prepare_extras(self, num_reqs: int, kv_len: int, prompt_tokens: int) -> None:
        """Make room."""

    def alone(self, num_reqs: int) -> float:
        """Seconds of a round of plain decoding."""

    def prompt(self, tokens: int, *, drafting: bool) -> float:
        """Seconds of a prompt."""


class ExtrasSampler:
    """Samples of plain rounds, by requests at the shallowest context, and of prompts, by their tokens.

    Like cells: warmed up one by one, then taken in passes of seeded random order. ``sample`` is one pass; call it
    between the passes over the grid, so that a machine that gets slower does so for both.
    """

    def __init__(self, runner: ExtrasRunner, config: ProfileConfig, *, seed: int = 0) -> None:
        self._runner = runner
        self._depth = min(config.kv_lengths)
        self._tokens = sorted(set(config.prefill_tokens))
        self._order = np.random.default_rng(seed)
        tasks = [("alone", count) for count in sorted(set(config.num_reqs))]
        tasks += [(kind, tokens) for kind in ("prompt", "drafting") for tokens in self._tokens]
        self._times: dict[tuple[str, int], list[float]] = {task: [] for task in tasks}
        runner.prepare_extras(max(config.num_reqs), self._depth, max(self._tokens, default=1))
        for task in tasks:
            for _ in range(max(1, config.warmup)):
                self._run(task)

    def _run(self, task: tuple[str, int]) -> float:
        kind, size = task
        return self._runner.alone(size) if kind == "alone" else self._runner.prompt(size, drafting=kind == "drafting")

    def sample(self) -> None:
        """One time of each."""
        tasks = list(self._times)
        for index in self._order.permutation(len(tasks)):
            self._times[tasks[index]].append(self._run(tasks[index]))

    def result(self) -> dict[str, Any]:
        """Fields for sps.json: ``rounds_alone`` and ``prefill``."""
        while len(next(iter(self._times.values()))) < _EXTRA_SAMPLES:
            self.sample()
        median = {task: 1e3 * float(np.median(values)) for task, values in self._times.items()}
        count = {task: len(values) for task, values in self._times.items()}
        return {
            "rounds_alone": [{"num_reqs": size, "kv_len": self._depth, "n": count[kind, size],
                              "p50_ms": median[kind, size]} for kind, size in self._times if kind == "alone"],
            "prefill": [asdict(PrefillCell(tokens, count["prompt", tokens], median["prompt", tokens],
                                           median["drafting", tokens])) for tokens in self._tokens],
        }


def read_extras(path: str | PathLike[str]) -> dict[str, Any]:
    """``alone`` (rows) and ``prefill`` (cells) of sps.json, empty where the profile has none, and ``padded``: whether
    it is of our own decoder, whose rows all cost what the longest context in the batch does.

    Raises InputRefused for a missing or damaged file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return {"alone": list(values.get("rounds_alone", ())),
                "prefill": [PrefillCell(**row) for row in values.get("prefill", ())],
                "padded": str(values.get("engine", "")).startswith(IN_PROCESS)}
    except FileNotFoundError:
        raise InputRefused(f"throughput profile not found: {path}. Make it with: launch/profile_throughput.py"
                           ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputRefused(f"{path} is not a throughput profile ({error}). Measure again with "
                           "launch/profile_throughput.py.") from None
