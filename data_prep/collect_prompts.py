"""Prompts from any source, with ids, domains and a split that adding data never moves.

    python data_prep/collect_prompts.py +experiment=qwen3_8b
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("collect_prompts")
