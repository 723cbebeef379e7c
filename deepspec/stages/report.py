"""Stage: one self-contained page about the run, or about several."""

import logging

from deepspec import distributed
from deepspec.artifacts import atomic_write_bytes
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config
from deepspec.report.build import build_report
from deepspec.report.compare import find_runs
from deepspec.report.inputs import read_run_files
from deepspec.report.learning import learning_lines
from deepspec.report.pairs import pair_lines, pairs

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Write ``report.html`` into the run directory; ``config.runs`` names other runs to compare with.

    Raises InputRefused when one of those is not there. Whatever this run lacks, the page says so.
    """
    if distributed.rank() != 0:
        return
    directory = run_dir(config)
    files, others = read_run_files(directory), find_runs(config.runs, directory.parent)
    html = build_report(files, others)
    path = directory / "report.html"
    atomic_write_bytes(path, html.encode())
    for line in [*pair_lines(pairs([files, *others])), *learning_lines(files)]:
        log.info("%s", line)
    log.info("report: %s (%.0f kB, opens in any browser)", path, len(html) / 1000)
