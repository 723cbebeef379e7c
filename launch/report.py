"""One self-contained page with every figure of a run.

    python launch/report.py run.dir=runs/tiny
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("report")
