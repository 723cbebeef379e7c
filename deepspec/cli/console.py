"""Console commands of an installation: deepspec-train, deepspec-calibrate, ...

The main job and the extraction of features are started by the deepspeed launcher. Its own options come first::

    deepspec-train --num_gpus 4 --hostfile hosts -- +experiment=qwen3_8b

which is ``deepspeed --num_gpus 4 --hostfile hosts --module deepspec.cli train_drafter +experiment=qwen3_8b``.
``python -m deepspec.cli NAME`` runs a script in this process.
"""

import os
import sys
from pathlib import Path
from typing import Mapping, Optional, Sequence

from deepspec.cli import job, sweep
from deepspec.cli.scripts import SCRIPTS, console_name, script_name
from deepspec.config.compose import is_help
from deepspec.errors import ConfigError, UserError
from deepspec.runs.child import launcher


def launched(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Optional[list[str]]:
    """The command of the launcher that is to run script ``name`` in this process's place; None: it runs here.

    Raises ConfigError for launcher options before a script that is not launched.
    """
    before, found, after = _split(arguments)
    if not SCRIPTS[name].ranks or "RANK" in environ:
        if found:
            raise ConfigError(f"Nothing is launched here, so there are no options to give before --: {before}. Leave "
                              "out the two dashes.")
        return None
    here = is_help(list(after)) or "plan=true" in after
    return None if here and not before else [*launcher(), *before, "--module", "deepspec.cli", name, *after]


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    given = list(arguments)
    if "--" not in given:
        return [], False, given
    place = given.index("--")
    return given[:place], True, given[place + 1:]


def run(name: str, arguments: Sequence[str]) -> None:
    """Run the script ``name`` in this process."""
    sys.argv = [sys.argv[0], *arguments]
    if name == "sweep":
        sweep.main()
    else:
        job.main(name)


def start(name: str, arguments: Sequence[str]) -> None:
    """Run the script ``name``, under the launcher where several ranks make it faster."""
    try:
        command = launched(name, arguments, os.environ)
    except UserError as error:
        job.leave(error, all_ranks=False)
    if command is None:
        run(name, arguments)
    else:
        sys.stdout.flush()
        os.execv(command[0], command)


def main() -> None:
    """Entry of every console command: which one is told by the name it was started by."""
    name = script_name(Path(sys.argv[0]).stem)
    if name is None:
        raise SystemExit(f"{sys.argv[0]}: there is no such command. There are: "
                         f"{', '.join(console_name(one) for one in SCRIPTS)}.")
    start(name, sys.argv[1:])
