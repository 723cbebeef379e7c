"""The main job: every stage from prompts to report, or those named by ``stages``.

    deepspeed launch/train_drafter.py +experiment=qwen3_8b
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("train_drafter")
