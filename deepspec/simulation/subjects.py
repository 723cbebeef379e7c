"""What is simulated: a drafter with its own traces and prices, of this run or another one."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import numpy as np

from deepspec.calibration import Calibration
from deepspec.config.schema import SchedulerConfig
from deepspec.decoding.modes import SCHEDULED
from deepspec.errors import InputRefused
from deepspec.profiling.files import SPS_FILE
from deepspec.profiling.scheduler import scheduler_factory, spread
from deepspec.scheduling import Floats
from deepspec.simulation.costs import StepCosts, check_same_machine
from deepspec.simulation.policies import Policy
from deepspec.simulation.traces import Traces

TRACES_FILE = "simulation/traces.npz"


@dataclass(frozen=True)
class Subject:
    """One drafter. ``depth`` and ``block`` are its layers and draft tokens, for the recommendation."""

    name: str
    traces: Traces
    costs: StepCosts
    algorithm: str = ""
    layers: Optional[int] = None
    calibration: Optional[Calibration] = None

    def policy(self, mode: str, scheduler: SchedulerConfig, length: Optional[int] = None) -> Policy:
        """How ``mode`` decodes with this drafter; ``length`` of fixed mode, None: the whole block."""
        if mode == "none":
            return Policy("none")
        if mode in SCHEDULED:
            logits, survival = known_blocks(self.traces)
            cost = replace(self.costs.tables[0], convex=True)
            make = scheduler_factory(cost, self.traces.draft_length, scheduler, self.calibration, logits=logits,
                                     survival=survival)
            return Policy(mode, scheduler=lambda: make(mode))
        return Policy(mode, self.traces.draft_length if length is None else length)


def known_blocks(traces: Traces) -> tuple[Optional[Floats], Optional[Floats]]:
    """What a scheduler knows of a drafter before it serves: recorded confidences, or how often blocks got so far."""
    if traces.logits is not None:
        return spread(traces.logits), None
    return None, (traces.accepted[:, None] > np.arange(traces.draft_length)).mean(axis=0, keepdims=True)


def read_profile_header(directory: Path) -> dict[str, Any]:
    """Content of ``profile/sps.json``. Raises InputRefused if there is none."""
    path = directory / "profile" / SPS_FILE
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(header, dict):
            raise ValueError("it is no table of names and values")
        return header
    except FileNotFoundError:
        raise InputRefused(f"{path} is missing: the simulation prices its steps by it. Make it with: "
                           f"python launch/profile_throughput.py run.dir={directory}") from None
    except ValueError as error:
        raise InputRefused(f"{path} is not readable as JSON ({error}). Measure again with "
                           f"launch/profile_throughput.py run.dir={directory}.") from None


def calibrated(directory: Path, traces: Traces) -> Optional[Calibration]:
    """The run's calibration, None without a confidence head or a calibration."""
    path = directory / "calibration.json"
    if traces.logits is None or not path.is_file():
        return None
    return Calibration.load(path, block_size=traces.draft_length, drafter_sha256=traces.drafter_sha256)


def other_subject(directory: Path, own_header: dict[str, Any]) -> Subject:
    """The drafter of another run, which must have been simulated once itself so that its traces are there.

    Raises InputRefused for missing traces or profile, or a profile of another machine or target.
    """
    header = read_profile_header(directory)
    check_same_machine(own_header, header, str(directory))
    path = directory / TRACES_FILE
    if not path.is_file():
        raise InputRefused(f"runs: {directory} has no acceptance traces ({TRACES_FILE}). Make them with: "
                           f"python launch/simulate_serving.py run.dir={directory}")
    traces = Traces.load(path, drafter_sha256=header.get("drafter_sha256"))
    drafter = _drafter_options(directory)
    return Subject(directory.resolve().name, traces, StepCosts.load(directory / "profile"),
                   str(drafter.get("algorithm", "")), drafter.get("num_layers"), calibrated(directory, traces))


def _drafter_options(directory: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        return dict(manifest["config"]["drafter"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
