"""A sweep's command line: launch/sweep.py and deepspec-sweep."""

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from deepspec.cli.help import command_line, help_text, wants_options
from deepspec.cli.job import leave
from deepspec.config.compose import CONF_DIR, compose_checked, is_help, register_schema, split_argv, to_config
from deepspec.config.sweeping import job_overrides, read_command
from deepspec.errors import ConfigError, UserError
from deepspec.planning.validate import validate
from deepspec.runs.names import swept
from deepspec.runs.status import COMPLETE, STOPPED
from deepspec.runs.sweep import JobFailed, finish, run_job


def _help(argv: list[str]) -> None:
    overrides, flags = split_argv([word for word in argv if word not in ("-m", "--multirun")])
    if wants_options(flags):
        sys.stdout.write(help_text("sweep", compose_checked(overrides, "sweep")))
        raise SystemExit(0)


def main() -> None:
    """Check the whole command, let Hydra's sweeper run the jobs, and end with the table of all of them.

    Exit codes: 0 all jobs complete, 1 one failed or was stopped, 2 wrong command line or configuration.
    """
    try:
        _help(sys.argv[1:])
        given = read_command(sys.argv[1:], os.environ, validate)
        if given.config.plan:
            raise ConfigError("plan=true prints the plan of one job, not of a sweep. Give it, with one value of every "
                              f"swept option, to: {command_line('train_drafter')} plan=true")
    except UserError as error:
        leave(error, all_ranks=False)
    register_schema()
    sys.argv = [sys.argv[0], *given.flags, *given.overrides]
    done = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="sweep")
    def task(composed: DictConfig) -> float:
        hydra_config = HydraConfig.get()
        directory = Path(hydra_config.sweep.dir)
        overrides = job_overrides(hydra_config.overrides.task)
        options = to_config(composed).sweep
        status = run_job(directory, overrides, swept(overrides, given.recognised), options, directory.name)
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
