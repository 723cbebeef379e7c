"""Housekeeping of run directories.

    python -m deepspec.runs list [ROOT]
    python -m deepspec.runs show RUN
    python -m deepspec.runs compare RUN RUN ...
    python -m deepspec.runs clean [ROOT] [--data DATA_ROOT] [--yes]

Exit codes: 0 done, 2 wrong usage, 3 no such run, 1 anything else.
"""

import argparse
import logging
import shutil
import sys
from pathlib import Path
from typing import Optional, Sequence

from deepspec.errors import InputRefused, UserError
from deepspec.report.columns import columns
from deepspec.report.compare import pooled_length
from deepspec.report.inputs import interval, main_setting, speeds
from deepspec.report.summary import summary_table
from deepspec.runs.tree import Run, find, in_use, listing, removable, size, unused_data

log = logging.getLogger("deepspec.runs")


def _list(arguments: argparse.Namespace) -> int:
    log.info("%s", listing(arguments.root))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    run = find(arguments.run)[0]
    rows = [["stage", "status", "seconds"]]
    for name, record in run.stages.items():
        rows.append([name, run.status(name), f"{record.get('seconds', 0):.0f}"])
    log.info("%s\nstages\n%s\n%.1f MB on disk", summary_table(run.path), columns(rows, left=2), size(run.path) / 1e6)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    runs = [find(path)[0] for path in arguments.run_dirs]
    domains = list(dict.fromkeys(name for run in runs for name in _domains(run)))
    rows = [["run", "algorithm", *domains, "mean", "best tokens/s"]]
    for run in runs:
        found = _domains(run)
        rates = [value for one in speeds(run.files.evaluation) for value in (one.fixed, one.scheduled) if value]
        length = pooled_length(run.files)
        rows.append([run.files.name, str(run.files.option("drafter", "algorithm") or "-"),
                     *(found.get(name, "-") for name in domains), "-" if length is None else f"{length:.3f}",
                     f"{max(rates):.1f}" if rates else "-"])
    log.info("tokens per round, bonus token included, with 95 %% intervals\n%s", columns(rows, left=2))
    return 0


def _domains(run: Run) -> dict[str, str]:
    setting = main_setting(run.files.evaluation)
    texts = {}
    for name, values in (setting.group("domains").items() if setting else ()):
        bounds = interval(values)
        length = values.get("acceptance_length")
        if length is not None:
            texts[name] = f"{length:.2f}" + (f" ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else "")
    return texts


def _clean(arguments: argparse.Namespace) -> int:
    runs = find(arguments.root)
    if arguments.data is not None and not arguments.data.is_dir():
        raise InputRefused(f"--data {arguments.data} is not a directory. Give the run.data_root of the runs.")
    doomed = []
    for run in runs:
        if in_use(run.path):
            log.info("%s: in use, left alone", run.path)
        else:
            doomed += removable(run.path)
    if arguments.data is not None:
        doomed += unused_data(arguments.data, runs)
    total = 0
    for path, reason in doomed:
        total += (taken := size(path))
        log.info("%s  %.1f MB: %s", path, taken / 1e6, reason)
        if arguments.yes:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    log.info("%s %.1f MB%s", "removed" if arguments.yes else "would remove", total / 1e6,
             "" if arguments.yes or not doomed else "; do it with --yes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepspec.runs", description="Look after run directories.")
    actions = parser.add_subparsers(dest="action", required=True)
    one = actions.add_parser("list", help="all runs of a tree, one line each")
    one.add_argument("root", type=Path, nargs="?", default=Path("runs"))
    one.set_defaults(run_action=_list)
    one = actions.add_parser("show", help="stages, results and size of a run")
    one.add_argument("run", type=Path, metavar="RUN")
    one.set_defaults(run_action=_show)
    one = actions.add_parser("compare", help="acceptance of several runs by domain")
    one.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN")
    one.set_defaults(run_action=_compare)
    one = actions.add_parser("clean", help="what can go: old checkpoints, leftovers, unused feature stores")
    one.add_argument("root", type=Path, nargs="?", default=Path("runs"))
    one.add_argument("--data", type=Path, help="data folder whose feature stores to look at, too. ROOT must then hold "
                     "every run that uses them")
    one.add_argument("--yes", action="store_true", help="remove, do not only tell")
    one.set_defaults(run_action=_clean)
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one action; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run_action(parsed))
    except UserError as error:
        log.error("%s", error)
        return error.exit_code


def entry() -> None:
    """The console command deepspec-runs."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
