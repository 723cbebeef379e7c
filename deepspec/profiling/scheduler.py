"""A scheduler from a profile on disk, or the reason why that profile cannot make one."""

import logging
from os import PathLike
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Union

import numpy as np
from numpy.typing import ArrayLike

from deepspec.calibration import Calibration, ConfidenceRecords
from deepspec.config.schema import SchedulerConfig
from deepspec.decoding.cost import CostTable, read_cells
from deepspec.decoding.drift import CostDrift
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.errors import InputRefused
from deepspec.profiling.files import RECORDS_FILE, SPS_FILE
from deepspec.scheduling import Floats, SpsTable

log = logging.getLogger(__name__)
_SAMPLE = 128  # recorded blocks that a scheduler starts from
SchedulerFactory = Callable[[str], ThroughputScheduler]
POLICIES = {"scheduled": "early_stop", "asynchronous": "lagged"}


def trusted_cost(directory: str | PathLike[str], *, min_samples: int, **conditions: Any) -> CostTable:
    """Costs of ``profile/``.

    Raises:
        InputRefused: missing or damaged, measured under other ``conditions`` (hardware, dtype, target, drafter),
            flatter than 5 %, with fewer than ``min_samples`` in a cell, or without two lengths at any request count.
            The message names the reason.
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


def recorded_logits(path: str | PathLike[str], drafter_sha256: str) -> Optional[Floats]:
    """Confidence logits [n, K] of recorded blocks, evenly chosen; None where there are none of this drafter."""
    if not Path(path).is_file():
        return None
    try:
        return spread(ConfidenceRecords.load(path, drafter_sha256=drafter_sha256).logits)
    except InputRefused as error:
        log.info("the scheduler starts without knowing the drafter: %s", error)
        return None


def spread(blocks: ArrayLike) -> Floats:
    """``_SAMPLE`` of the rows [n, K], evenly chosen."""
    blocks = np.asarray(blocks, dtype=np.float64)
    return blocks[np.linspace(0, len(blocks) - 1, min(_SAMPLE, len(blocks))).astype(int)]


def scheduler_factory(cost: CostTable, draft_length: int, config: SchedulerConfig,
                      temperatures: Union[None, Sequence[float], Calibration] = None, *,
                      logits: Optional[Floats] = None, survival: Optional[Floats] = None) -> SchedulerFactory:
    """Makes a fresh scheduler for a mode of ``POLICIES``; ``temperatures`` as ``ThroughputScheduler`` takes them.

    It starts from confidence ``logits`` [n, K] of recorded blocks, or from ``survival`` [n, K] where there is no
    confidence head.
    """
    drift = CostDrift() if config.adapt else None  # what one decode learns of the machine serves the next

    def make(mode: str) -> ThroughputScheduler:
        # Algorithm 1 would stop in front of a riser, so it sees the envelope; a global search looks over it.
        made = ThroughputScheduler(
            cost.exact() if POLICIES[mode] == "lagged" else cost, draft_length, temperatures=temperatures,
            policy=POLICIES[mode], min_gain=config.min_gain, probe_share=config.probe_share,
            max_verify=config.max_verify, floor=config.min_tokens_per_second_per_user,
            drift=drift)
        known = survival if logits is None else made.survival(logits, len(logits))
        return made if known is None else made.start_from(known)

    return make
