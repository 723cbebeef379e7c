"""Which prompts the confidence stage drafts on."""

import logging
from pathlib import Path
from typing import Any, Optional

from deepspec.calibration import balanced_order
from deepspec.config.paths import responses_dir
from deepspec.config.schema import Config
from deepspec.data.jsonl import read_rows
from deepspec.data.prompt_rows import RowRefused, conversation, is_slot
from deepspec.data.rendering import Renderer, RenderError
from deepspec.data.responses import RESPONSES_FILE, read_responses
from deepspec.decoding.types import DecodeRequest
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)


def held_out_requests(config: Config, limit: Optional[int], tokenizer: Any = None) -> list[DecodeRequest]:
    """First turns of at most ``limit`` prompts, in an order even over domains.

    They are the run's own held-out prompts, or the rows of ``confidence.prompts``: calibration needs no answers, so a
    team can take many more prompts for it than it generates answers for, from its own traffic.

    Raises InputRefused where there is no prompt.
    """
    if config.confidence.prompts is not None:
        found = _from_file(config, tokenizer)
        if not found:
            raise InputRefused(f"confidence.prompts={config.confidence.prompts!r} has no prompt that this run was not "
                               f"trained on and that fits into data.max_length={config.data.max_length}. Give others.")
    else:
        found = {row.id: DecodeRequest(id=row.id, prompt_ids=row.turns[0].prompt_ids, domain=row.domain)
                 for row in read_responses(responses_dir(config), "held_out")}
    order = balanced_order(list(found), [request.domain for request in found.values()])[:limit]
    if not order:
        raise InputRefused(f"{responses_dir(config)} has no held-out responses to decode. Raise data.min_held_out, run "
                           "data_prep/collect_prompts.py and data_prep/generate_responses.py again, or give "
                           "confidence.prompts a file of prompts.")
    return [found[name] for name in order]


def _from_file(config: Config, tokenizer: Any) -> dict[str, DecodeRequest]:
    """Prompts of ``confidence.prompts`` by id; rows of the training split, and prompts trained on, are left out."""
    path = Path(config.confidence.prompts or "").expanduser()
    renderer = Renderer(tokenizer, config.target.thinking, config.target.name)
    trained, found, left_out, long = _trained(config), {}, 0, 0
    for number, row in read_rows(path):
        try:
            messages, tools = conversation(row)
            slot = next((place for place, message in enumerate(messages) if is_slot(message)), len(messages))
            ids = tuple(renderer.prompt_ids(messages[:slot], tools))
        except (RowRefused, RenderError) as error:
            raise InputRefused(f"{path}:{number}: not a prompt ({error}). A row has \"prompt\": text, \"turns\": "
                               "[text, ..] or \"messages\": [{role, content}, ..].") from None
        if row.get("split") == "train" or ids in trained:
            left_out += 1
        elif len(ids) > config.data.max_length:
            long += 1
        else:
            name = str(row.get("id", f"row-{number}"))
            found[name] = DecodeRequest(id=name, prompt_ids=ids, domain=str(row.get("domain", "chat")))
    if left_out or long:
        log.info("%s: %d prompts; left out: %d of the training split, %d longer than data.max_length=%d", path,
                 len(found), left_out, long, config.data.max_length)
    return found


def _trained(config: Config) -> set[tuple[int, ...]]:
    """Token ids of the first turns that were trained on, where the run's responses are on this machine."""
    directory = responses_dir(config)
    if not (directory / RESPONSES_FILE).is_file():
        log.warning("%s is not here, so prompts of %s that were trained on cannot be told", directory,
                    config.confidence.prompts)
        return set()
    return {row.turns[0].prompt_ids for row in read_responses(directory, "train")}
