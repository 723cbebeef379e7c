"""The target's own answers, from any OpenAI-compatible server or in process.

    python data_prep/generate_responses.py +experiment=qwen3_8b responses=server
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("generate_responses")
