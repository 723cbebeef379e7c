"""What every script does before and around its stages: command line, checks, exit codes."""

import contextlib
import errno
import importlib
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn, Optional, Sequence

import hydra
from omegaconf import DictConfig

from deepspec.artifacts import atomic_write_json
from deepspec.cli.help import help_text, wants_options
from deepspec.cli.scripts import SCRIPTS, Script, as_commands
from deepspec.config.compose import (
    CONF_DIR, PACKAGED, adapt_argv, compose_checked, compose_config, is_help, known_keys, options, parse_overrides,
    quiet_third_party, register_schema, split_argv, to_config,
)
from deepspec.config.schema import Config
from deepspec.config.unread import refuse_unread
from deepspec.errors import ConfigError, InputRefused, UserError

log = logging.getLogger(__name__)
OVERRIDES = "overrides.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_TURN_SECONDS = 2.0
_START_AGAIN = "Give +experiment=NAME and the options the run was started with: they are stored again."
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Without the stack traces of a store whose other end has ended: the error itself is raised, and shown once.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "WANDB_SILENT": "true",
    # Spinning OpenMP threads slow a step five to tenfold as soon as anything else wants a core.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def main(name: str) -> None:
    """Run the script ``name`` (deepspec.cli.scripts) with the process's arguments.

    Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 3 input refused; a job may have more.
    """
    script = SCRIPTS[name]
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if script.group is not None:
        sys.argv = [sys.argv[0], *(in_group(argument, script.group) for argument in sys.argv[1:])]
    try:
        flags, overrides = _prepare(name, script)
    except UserError as error:
        leave(error, all_ranks=False)
    register_schema()
    sys.argv = [sys.argv[0], *flags, *overrides, f"hydra.job.name={name}"]  # the log is named by it

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)
    def task(composed: DictConfig) -> None:
        _run(to_config(composed), overrides, script)

    task()


def in_group(argument: str, group: str) -> str:
    """``key=value`` as ``group.key=value`` where the group has that option and no other meaning comes first.

    A name that is also a config group keeps that meaning when the value is one of its choices (``drafter=dflash``).
    """
    key, separator, value = argument.partition("=")
    own = {name.rpartition(".")[2] for name in known_keys() if name.rpartition(".")[0] == group}
    if not separator or key not in own or value in options(key):
        return argument
    return f"{group}.{argument}"


def _prepare(name: str, script: Script) -> tuple[list[str], list[str]]:
    """Check the whole command before torch is imported. Returns Hydra's flags and the overrides."""
    overrides, flags = split_argv(adapt_argv(sys.argv[1:], os.environ))
    given = parse_overrides(overrides)
    overrides = with_stored_overrides(overrides)
    if any(item.key_or_group.partition(".")[0] == "sweep" for item in parse_overrides(overrides)):
        raise ConfigError("sweep and its options belong to python launch/sweep.py -m, which starts this script once "
                          "for every job.")
    if is_help(flags):
        composed = compose_checked(overrides, name, script.group or "")
        if wants_options(flags):
            sys.stdout.write(help_text(name, composed))
            raise SystemExit(0)
        return flags, overrides
    config = compose_config(overrides, name, script.group or "")
    chosen = chosen_stages(config, script.stages)
    from deepspec.planning.plan import make_plan, render
    from deepspec.planning.preflight import preflight
    from deepspec.planning.validate import validate
    from deepspec.runs.status import read_status

    validate(config)
    if read_status(Path(config.run.dir)) is None:  # the command of a sweep's job was judged with the whole sweep
        refuse_unread(given, [config.drafter.algorithm])
    if config.plan:
        config.stages = list(chosen)
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(render(make_plan(config)) + "\n")
        raise SystemExit(0)
    if script.job is None:
        preflight(config, list(chosen))
    else:
        from deepspec.planning.jobs import check_job

        check_job(config, script.group or name)
    return flags, overrides


def chosen_stages(config: Config, stages: Optional[Sequence[str]]) -> tuple[str, ...]:
    """The stages of this job: the script's own, or those the configuration names."""
    return tuple(stages if stages is not None else config.stages)


def with_stored_overrides(overrides: list[str]) -> list[str]:
    """For ``run.dir=DIR`` of an existing run and no experiment: that run's own overrides first, these on top."""
    parsed = {item.key_or_group: item for item in parse_overrides(overrides)}
    if "run.dir" not in parsed or "experiment" in parsed:
        return overrides
    directory = Path(str(parsed["run.dir"].value()))
    path = directory / OVERRIDES
    if not path.is_file():
        raise ConfigError(
            f"run.dir={directory} holds no run (there is no {path.name} in it). Give the directory of a run that "
            "launch/train_drafter.py started, or say what to run with +experiment=NAME."
        )
    stored = _stored(path)
    return [text for text in stored if parse_overrides([text])[0].key_or_group not in parsed] + overrides


def _stored(path: Path) -> list[str]:
    """The options in ``path``. Raises InputRefused where it is no list of them."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputRefused(f"{path} is not readable as JSON ({error}). {_START_AGAIN}") from None
    if not isinstance(stored, list) or not all(isinstance(text, str) for text in stored):
        raise InputRefused(f"{path} is not the list of options a run was started with. {_START_AGAIN}")
    return stored


def _run(config: Config, overrides: list[str], script: Script) -> None:
    quiet_third_party()
    from deepspec.stages.pipeline import run_stages
    from deepspec.training.signals import ignore_save_requests, watch_launcher

    ignore_save_requests()
    watch_launcher()
    stages = script.stages
    try:
        if script.job is not None:
            code = importlib.import_module(script.job).run(config, overrides)
            if code:
                raise SystemExit(code)
            return
        path = Path(config.run.dir) / OVERRIDES
        is_main_job = stages is None and os.environ.get("RANK", "0") == "0"
        if is_main_job and not path.is_file():
            atomic_write_json(path, overrides)
        run_stages(config, chosen_stages(config, stages), force=stages[0] if stages == ("export",) else None)
        if is_main_job:
            atomic_write_json(path, overrides)
    except UserError as error:
        leave(error, all_ranks=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in _NO_ROOM:
            traceback.print_exc()
            raise SystemExit(1) from None
        leave(UserError(f"Writing failed: {error}. What was finished before is intact. Make room (or check the file "
                        "system) and run the same command again: it continues from there."), all_ranks=True)
    except Exception as error:
        _lost(error, config)
        traceback.print_exc()
        raise SystemExit(1) from None


def _lost(error: Exception, config: Config) -> None:
    """Leave with one paragraph where another rank has ended first; the traceback goes to a file."""
    from deepspec import distributed

    if not distributed.lost_rank(error):
        return
    path = Path(config.run.dir) / f"lost-rank-{os.environ.get('RANK', '0')}.txt"
    where = ""
    with contextlib.suppress(OSError):
        path.write_text(traceback.format_exc(), encoding="utf-8")
        where = f" The traceback is in {path}."
    leave(UserError("Another rank has ended, or its host is not to be reached, and this rank with it; the reason is "
                    "among that rank's messages. Start the same command again: it continues from the last "
                    f"checkpoint.{where}"), all_ranks=True)


def leave(error: UserError, *, all_ranks: bool) -> NoReturn:
    """One paragraph on stderr and the error's exit code; checks that all ranks repeat are reported by rank 0 alone."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and not all_ranks:
        time.sleep(_TURN_SECONDS)  # the launcher kills rank 0, message and all, as soon as another rank has ended
    if rank == "0" or all_ranks:
        prefix = "" if rank == "0" else f"[rank {rank}] "
        text = as_commands(str(error)) if PACKAGED else str(error)
        sys.stderr.write(f"\n{prefix}{type(error).__name__}: {text}\n")
        sys.stderr.flush()
    # The process group may be waiting for ranks that will never come: leave without its destructors.
    if all_ranks and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(error.exit_code)
    sys.exit(error.exit_code)
