"""Options of sweeps. Standard library only, as deepspec.config.schema."""

from dataclasses import dataclass, field

OBJECTIVES = ("acceptance_length", "speedup", "validation")


@dataclass
class SweepConfig:
    """``launch/sweep.py -m``: one job of the main job's script for every combination of the swept options."""

    # acceptance_length, speedup: from the evaluation | validation: the best while training, for jobs without one
    objective: str = "acceptance_length"
    stop_on_failure: bool = False  # true: what follows a failed job is skipped
    # arguments of deepspeed for every job, as in [--num_gpus,4]; [none] runs jobs as single processes
    launcher: list[str] = field(default_factory=list)
