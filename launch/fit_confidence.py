"""Refit the confidence head on the drafter's own blocks and keep the records.

    python launch/fit_confidence.py run.dir=runs/tiny
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("fit_confidence")
