"""Prompts without a hub: code tasks from the standard library's own documentation, mathematics and logic from
generators, chat written for this project. Deterministic: the first n prompts do not depend on how many are asked for.
"""

import hashlib
import logging
from itertools import islice
from typing import Any, Iterator, Optional

from deepspec.data.embedded_chat import FORMS, SUBJECTS, WRITTEN
from deepspec.data.embedded_code import code_prompts
from deepspec.data.embedded_math import champ_prompts, math_prompts
from deepspec.errors import ConfigError

log = logging.getLogger(__name__)


def embedded_prompts(kind: str, limit: Optional[int], seed: int) -> list[dict[str, Any]]:
    """Up to ``limit`` rows ``{"prompt": ...}`` or ``{"turns": [...]}`` of a kind (math | code | chat | champ); all
    there are for None, except that ``math`` has millions and needs a limit.

    Gives fewer if fewer exist, and says so. Raises InputRefused naming the pip command for a missing package.
    """
    if kind not in KINDS:
        raise ConfigError(f"Embedded prompts of kind {kind!r} do not exist; there are {', '.join(KINDS)}.")
    if limit is None and kind == "math":
        raise ConfigError("Embedded math prompts number millions: set cap on the source, or data.max_prompts.")
    rows = list(islice(KINDS[kind](seed), limit))
    if limit is not None and len(rows) < limit:
        log.info("embedded %s prompts: %d were asked for, there are %d", kind, limit, len(rows))
    return rows


def chat_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Written conversations, then every form with every subject in an order chosen by ``seed``."""
    for turns in WRITTEN:
        yield {"turns": list(turns)}
    combined = [form.format(subject=subject) for form in FORMS for subject in SUBJECTS]
    combined.sort(key=lambda text: hashlib.sha256(f"{seed}\x1f{text}".encode()).digest())
    for text in combined:
        yield {"prompt": text}


KINDS = {"math": math_prompts, "code": code_prompts, "chat": chat_prompts, "champ": champ_prompts}
