"""A scheduler from a profile on disk, or the reason why that profile cannot make one."""

from os import PathLike
from pathlib import Path
from typing import Any, Callable, Sequence, Union

from deepspec.calibration import Calibration
from deepspec.config.schema import SchedulerConfig
from deepspec.decoding.cost import CostTable, read_cells
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.errors import InputRefused
from deepspec.profiling.files import RECORDS_FILE, SPS_FILE
from deepspec.scheduling import SpsTable

SchedulerFactory = Callable[[str], ThroughputScheduler]
POLICIES = {"scheduled": "early_stop", "asynchronous": "lagged"}


def trusted_cost(directory: str | PathLike[str], *, min_samples: int, **conditions: Any) -> CostTable:
    """Costs of ``profile/``.

    Raises:
        InputRefused: missing or damaged, measured under other ``conditions`` (hardware, dtype, target, drafter), flatter
            than 5 %, with fewer than ``min_samples`` in a cell, or without two lengths at any request count. The
            message names the reason.
    """
    directory = Path(directory)
    SpsTable.load(directory / SPS_FILE, **conditions)
    cells = read_cells(directory / RECORDS_FILE)
    poor = [cell for cell in cells if cell.n < min_samples]
    if poor:
        raise InputRefused(f"{directory / RECORDS_FILE}: {len(poor)} of {len(cells)} cells have fewer than "
                           f"profile.min_samples={min_samples} samples (the first: {poor[0].num_reqs} requests x "
                           f"{poor[0].verify_tokens} tokens, {poor[0].n}). Measure again with a larger "
                           "profile.samples_per_cell or profile.seconds_limit.")
    return CostTable.from_cells(cells)


def scheduler_factory(cost: CostTable, draft_length: int, config: SchedulerConfig,
                      temperatures: Union[None, Sequence[float], Calibration] = None) -> SchedulerFactory:
    """Makes a fresh scheduler for a mode of ``POLICIES``; ``temperatures`` as ``ThroughputScheduler`` takes them."""
    return lambda mode: ThroughputScheduler(
        cost, draft_length, temperatures=temperatures, policy=POLICIES[mode], min_gain=config.min_gain,
        probe_every=config.probe_every, max_verify=config.max_verify, floor=config.min_tokens_per_second_per_user)
