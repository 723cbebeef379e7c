"""SGLang's own interface: every answer carries its rounds. Written from the source of 0.5.23; not run against a live
server, which needs a GPU."""

from typing import Any, Mapping, Optional, Sequence

from deepspec.doctor.counts import PromptCounts, from_histogram
from deepspec.doctor.endpoint import Answer, Http, ServerFacts
from deepspec.errors import InputRefused

_PREFERRED = 1000.0  # logits


class SglangEngine:
    """A server started with ``sglang.launch_server``."""

    def __init__(self, http: Http, model: Optional[str] = None) -> None:
        self._http = http
        info = http.find("/get_server_info") or http.find("/server_info")
        if info is None:
            raise InputRefused("The server at doctor.endpoint has no /get_server_info: it is not SGLang. Leave "
                               "doctor.engine=auto, or give its own address rather than a proxy's.")
        algorithm, tokens = info.get("speculative_algorithm"), info.get("speculative_num_draft_tokens")
        if algorithm == "DSPARK" and info.get("speculative_dspark_block_size"):
            tokens = info["speculative_dspark_block_size"]
        elif tokens:
            tokens -= 1  # SGLang counts the anchor with them
        self.facts = ServerFacts(
            "sglang", info.get("version"), model or info.get("served_model_name") or info.get("model_path"),
            info.get("model_path"), info.get("context_length") or info.get("max_total_num_tokens"), info.get("dtype"),
            info.get("quantization"), info.get("speculative_draft_model_path"), algorithm, tokens)

    def totals(self) -> Optional[PromptCounts]:
        """None: the server keeps an average, no counts."""
        return None

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int, only: Sequence[int] = ()) -> Answer:
        """See ``Engine.answer``. It has no list of allowed tokens, so these are preferred beyond every other."""
        limits = {"logit_bias": {str(token): _PREFERRED for token in only}} if only else {}
        reply = self._http.ask("/generate", {"input_ids": list(prompt_ids), "sampling_params": limits | {
            "temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}})
        reply = reply[0] if isinstance(reply, list) else reply
        meta, ids = reply.get("meta_info") or {}, reply.get("output_ids")
        if not ids:
            raise InputRefused("The server returned no output_ids from /generate, so its answers cannot be compared "
                               "token by token. The doctor was written for SGLang 0.5.23.")
        rounds = meta.get("spec_verify_ct")
        if not rounds:
            return Answer(tuple(ids), None)
        drafted = meta.get("spec_num_proposed_drafts") or rounds * (self.facts.draft_length or 0)
        histogram = meta.get("spec_correct_drafts_histogram")
        if histogram:
            return Answer(tuple(ids), from_histogram(histogram, drafted))
        total = meta.get("spec_num_correct_drafts")
        total = meta["completion_tokens"] - rounds - 1 if total is None else total
        return Answer(tuple(ids), PromptCounts(rounds, drafted, total))

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Optional[list[int]]:
        """None: the server does not return the ids of a conversation."""
        return None
