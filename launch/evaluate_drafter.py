"""Lossless decoding with the drafter against plain decoding of the target.

    deepspeed launch/evaluate_drafter.py run.dir=runs/tiny
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("evaluate_drafter")
