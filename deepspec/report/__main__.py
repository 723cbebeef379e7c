"""``python -m deepspec.report runs/NAME``: the run's figures as a short table."""

import sys
from pathlib import Path

from deepspec.report.summary import summary_table

if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.stderr.write("usage: python -m deepspec.report RUN_DIRECTORY (an existing one)\n")
        raise SystemExit(2)
    sys.stdout.write(summary_table(Path(sys.argv[1])) + "\n")
