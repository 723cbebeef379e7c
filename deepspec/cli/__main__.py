"""``python -m deepspec.cli NAME [OPTIONS]``, which the launcher runs: ``deepspeed --module deepspec.cli NAME ...``."""

import sys

from deepspec.cli.console import run
from deepspec.cli.scripts import SCRIPTS, script_name


def _main() -> None:
    # The launcher's --local_rank stands before everything.
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    name = script_name(names[0]) if names else None
    if name is None:
        listed = "\n".join(f"  {one:<20} {script.summary}" for one, script in SCRIPTS.items())
        sys.stderr.write(f"python -m deepspec.cli NAME [OPTIONS]; NAME is one of\n{listed}\n")
        raise SystemExit(0 if {"-h", "--help"} & set(sys.argv[1:]) else 2)
    rest = list(sys.argv[1:])
    rest.remove(names[0])
    run(name, rest)


_main()
