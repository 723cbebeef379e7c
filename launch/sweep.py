"""A sweep: the main job for every combination of the values given, each under a launcher of its own.

    python launch/sweep.py -m +experiment=tiny drafter.block_size=4,8,16
    python launch/sweep.py -m +experiment=tiny +sweep=depth

The same command continues a sweep that was cut: complete jobs are skipped, the others go on from their checkpoints.
Exit codes: 0 all jobs complete, 1 one failed or was stopped, 2 wrong command line or configuration.
"""

import logging
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from deepspec.config.compose import CONF_DIR, is_help, register_schema, to_config
from deepspec.config.sweeping import job_overrides, read_command
from deepspec.errors import UserError
from deepspec.planning.validate import validate
from deepspec.runs.names import swept
from deepspec.runs.status import COMPLETE, STOPPED
from deepspec.runs.sweep import JobFailed, finish, run_job

log = logging.getLogger(__name__)


def main() -> None:
    """Check the whole command, let Hydra's sweeper run the jobs, and end with the table of all of them."""
    try:
        given = read_command(sys.argv[1:], os.environ, validate)
    except UserError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        raise SystemExit(error.exit_code) from None
    register_schema()
    sys.argv = [sys.argv[0], *given.flags, *given.overrides]
    done = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="sweep")
    def task(composed: DictConfig) -> float:
        hydra_config = HydraConfig.get()
        directory = Path(hydra_config.sweep.dir)
        overrides = job_overrides(hydra_config.overrides.task)
        options = to_config(composed).sweep
        status = run_job(directory, overrides, swept(overrides, given.common), options, directory.name)
        done.append(directory)
        if status.status == STOPPED:
            raise SystemExit(finish(directory, options.objective))
        # Grids go on after a failure, and the table tells; a sweeper that learns from results has to know.
        if status.status != COMPLETE and "BasicSweeper" not in hydra_config.sweeper._target_:
            raise JobFailed(f"{status.name}: {status.status}")
        return status.objective if status.objective is not None else float("nan")

    task()
    if not is_help(given.flags):
        directory = done[0] if done else Path("runs/sweeps") / given.config.run.name
        raise SystemExit(finish(directory, given.config.sweep.objective))


if __name__ == "__main__":
    main()
