"""Fit Sequential Temperature Scaling on held-out records.

    python launch/calibrate.py run.dir=runs/tiny
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("calibrate")
