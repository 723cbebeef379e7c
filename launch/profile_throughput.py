"""Measure steps per second of target and drafter on this machine.

    python launch/profile_throughput.py run.dir=runs/tiny
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("profile_throughput")
