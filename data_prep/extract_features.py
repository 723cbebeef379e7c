"""Hidden states of the target, checksummed and resumable.

    deepspeed data_prep/extract_features.py +experiment=qwen3_8b
"""

from deepspec.cli import main

if __name__ == "__main__":
    main("extract_features")
