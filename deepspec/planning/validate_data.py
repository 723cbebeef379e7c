"""Checks of the options that clean prompts."""

import re

from deepspec.config.schema import DataConfig
from deepspec.planning.require import require, whole, within


def check_cleaning(data: DataConfig) -> None:
    """Redaction, near duplicates and decontamination. Raises ConfigError."""
    require(data.redaction is None or data.redaction == "builtin"
            or bool(re.fullmatch(r"[\w.]+:[\w.]+", str(data.redaction))), "data.redaction", data.redaction,
            "null, builtin, or module:function")
    if data.near_duplicate_threshold is not None:
        within("data.near_duplicate_threshold", data.near_duplicate_threshold, 0.1, 1.0)
    whole("data.near_duplicate_num_perm", data.near_duplicate_num_perm, 16)
    whole("data.decontaminate_ngram", data.decontaminate_ngram, 5)
    files = list(data.decontaminate)
    require(len(set(files)) == len(files) and all(files), "data.decontaminate", files,
            "a list of different files")
