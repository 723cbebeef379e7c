"""vLLM's OpenAI-compatible server: its Prometheus counters read before and after every prompt."""

import re
import time
from typing import Any, Mapping, Optional, Sequence

from deepspec.doctor.counts import PromptCounts
from deepspec.doctor.endpoint import Answer, Http, ServerFacts
from deepspec.errors import InputRefused

_LINE = re.compile(r"^vllm:(?P<name>\w+?)(?:_total)?(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[0-9.eE+]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_SETTLE_SECONDS, _SETTLE_TRIES = 0.1, 50


def read_counters(text: str) -> tuple[Optional[PromptCounts], int]:
    """Rounds since start, summed over the server's engines (None without speculation), and generated tokens."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in _LINE.finditer(text):
        name, labels, value = line["name"], line["labels"] or "", float(line["value"])
        place = _POSITION.search(labels)
        if name == "spec_decode_num_accepted_tokens_per_pos" and place is not None:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    tokens = int(sums.get("generation_tokens", 0))
    if "spec_decode_num_drafts" not in sums:
        return None, tokens
    accepted = tuple(int(positions.get(k, 0)) for k in range(max(positions) + 1)) if positions else None
    return PromptCounts(int(sums["spec_decode_num_drafts"]), int(sums.get("spec_decode_num_draft_tokens", 0)),
                        int(sums.get("spec_decode_num_accepted_tokens", 0)), accepted), tokens


def difference(after: PromptCounts, before: PromptCounts) -> PromptCounts:
    """Counts made between two readings."""
    accepted = None
    if after.accepted is not None:
        earlier = before.accepted or (0,) * len(after.accepted)
        accepted = tuple(new - old for new, old in zip(after.accepted, earlier))
    return PromptCounts(after.rounds - before.rounds, after.drafted - before.drafted, after.total - before.total,
                        accepted)


class VllmEngine:
    """A server started with ``vllm serve``."""

    def __init__(self, http: Http, model: Optional[str] = None) -> None:
        self._http = http
        listed = (http.find("/v1/models") or {}).get("data") or []
        names = [entry.get("id") for entry in listed]
        if not listed or (model is not None and model not in names):
            raise InputRefused(f"The server at doctor.endpoint lists the models {names}, not doctor.model={model!r}. "
                               "Give an address of vLLM or SGLang, and a model it serves.")
        entry = listed[names.index(model)] if model is not None else listed[0]
        version = (http.find("/version") or {}).get("version")
        self.facts = ServerFacts("vllm", version, entry["id"], entry.get("root"), entry.get("max_model_len"))

    def _counters(self) -> tuple[Optional[PromptCounts], int]:
        text = self._http.text("/metrics")
        if text is None:
            raise InputRefused("The server has no /metrics, where vLLM counts accepted tokens. Start it without "
                               "--disable-log-stats, and give its own address rather than a proxy's.")
        return read_counters(text)

    def totals(self) -> Optional[PromptCounts]:
        """See ``Engine.totals``."""
        return self._counters()[0]

    def _settled(self, before: int, made: int) -> tuple[Optional[PromptCounts], int]:
        """Counters once the last step of an answer is in them: it is counted just after the answer has gone out."""
        counts, tokens = self._counters()
        for _ in range(_SETTLE_TRIES):
            time.sleep(_SETTLE_SECONDS)
            again = self._counters()
            if again == (counts, tokens) and tokens - before >= made:
                break
            counts, tokens = again
        return counts, tokens

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int, only: Sequence[int] = ()) -> Answer:
        """See ``Engine.answer``."""
        before, tokens_before = self._counters()
        limits = {"allowed_token_ids": list(only)} if only else {}
        reply = self._http.ask("/v1/completions", limits | {
            "model": self.facts.model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, "temperature": 0.0,
            "ignore_eos": True, "return_token_ids": True})
        ids = reply["choices"][0].get("token_ids")
        if not ids:
            raise InputRefused("The server returned no token ids for return_token_ids=true, so its answers cannot be "
                               "compared token by token. The doctor needs vLLM 0.11 or later.")
        after, tokens = self._settled(tokens_before, len(ids))
        counts = None if after is None or before is None else difference(after, before)
        return Answer(tuple(ids), counts, tokens - tokens_before == len(ids))

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Optional[list[int]]:
        """See ``Engine.render``."""
        body = {"model": self.facts.model, "messages": [dict(message) for message in messages],
                "add_generation_prompt": True}
        reply = self._http.try_ask("/tokenize", body | ({"chat_template_kwargs": dict(options)} if options else {}))
        return None if reply is None else list(reply["tokens"])
