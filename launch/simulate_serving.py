"""Simulate serving from this run's profile and acceptance: throughput, speed per user, what to serve with.

    python launch/simulate_serving.py run.dir=runs/tiny 'simulate.concurrency=[1,8,32]'
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("simulate_serving")
