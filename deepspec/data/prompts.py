"""The prompts of a run as they lie on disk: one conversation with slots per row, and its split."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional

from deepspec.data.jsonl import read_rows
from deepspec.errors import InputRefused

PROMPTS_FILE = "prompts.jsonl"
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class PromptRow:
    """One conversation to be answered; see prompt_rows for its slots."""

    id: str
    domain: str
    split: str  # train | held_out
    source: str
    messages: tuple[dict[str, Any], ...]
    tools: Optional[tuple[dict[str, Any], ...]] = None

    def to_json(self) -> dict[str, Any]:
        """The row as it is written."""
        row = {"id": self.id, "domain": self.domain, "split": self.split, "source": self.source,
               "messages": list(self.messages)}
        return row | ({"tools": list(self.tools)} if self.tools else {})


def read_prompts(directory: os.PathLike | str, split: Optional[str] = None) -> Iterator[PromptRow]:
    """Rows of ``prompts.jsonl`` as they were written; of one split if it is named."""
    path = Path(directory) / PROMPTS_FILE
    for number, row in read_rows(path):
        if split not in (None, row.get("split")):
            continue
        try:
            tools = tuple(row["tools"]) if row.get("tools") else None
            yield PromptRow(row["id"], row["domain"], row["split"], row["source"], tuple(row["messages"]), tools)
        except (KeyError, TypeError) as error:
            raise InputRefused(f"{path}:{number}: not a prompt row of this version (field {error}).") from None
