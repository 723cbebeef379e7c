"""Make a run of a drafter trained elsewhere (DeepSpec, speculators, SpecForge or z-lab's DFlash layout), to evaluate,
calibrate, profile or export it. No training.

    python launch/import_drafter.py +experiment=qwen3_8b run.name=reference drafter.init_from=DIR
    deepspeed launch/evaluate_drafter.py run.dir=runs/reference
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("import_drafter")
