"""features=disaggregated: one launch divided into ranks that train and ranks that run the target for them.

Only the train stage needs target ranks. They take part in no other stage of the same launch: until training begins they
wait on the store, without a collective, and when it is done they end. A job without the train stage is not divided.
"""

from contextlib import contextmanager
from typing import Iterator, Optional, Sequence

from deepspec import distributed
from deepspec.config.schema import Config


@contextmanager
def divided(config: Config, stages: Sequence[str]) -> Iterator[Optional[distributed.Split]]:
    """The division of this launch for as long as the job runs; None for a job that needs none."""
    if config.features.mode != "disaggregated" or "train" not in stages:
        yield None
        return
    split = distributed.split(config.target.ranks)
    try:
        yield split
    except SystemExit as ended:
        if not ended.code:  # stopped by a signal, and saved
            split.leave()
        raise
    split.leave()


def begin_training() -> None:
    """Target ranks start loading when training begins."""
    split = distributed.current_split()
    if split is not None and split.rank == 0:
        split.tell("open")
