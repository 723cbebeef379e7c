"""Random conversations: what is trained on is what was served, and the mask covers what the target said, no more."""

import json
from typing import Any, Optional

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny_data import END, MASK, ROWS, tiny_tokenizer

from deepspec.data.dialogue import AnswerLimits, Dialogue, TurnRefused
from deepspec.data.jsonl import dump_row
from deepspec.data.prompt_rows import RowRefused, conversation
from deepspec.data.prompts import PromptRow
from deepspec.data.rendering import Renderer, RenderError
from deepspec.data.responses import response_from_json
from deepspec.data.samples import sample_runs
from deepspec.data.server import Reply
from deepspec.data.server_job import Request, ServerJob
from deepspec.targets.sampling import Sampling

PIECES = [
    "the fox", " ", "\n", "\n\n", "", "<think>", "</think>", "<think>\n\n</think>\n\n", "<|im_end|>", "<|im_start|>",
    "<|im_start|>assistant\n", "<|endoftext|>", "<s>", "<tool_call>", "[assistant]", '{"x": 1}',
    "\u2028", "\u0085", "\x00", "\ufeff", "é", "e\u0301", "😀", "👩\u200d👩\u200d👧", "漢字", "עב",
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(st.characters(codec="utf-8"), max_size=6)),
                 max_size=5).map("".join)
mostly_texts = st.one_of(texts.map("so {}".format), texts.map("{}!".format), texts)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"😀": 1}}}]


@st.composite
def rows(draw: st.DrawFn, plain: bool) -> dict[str, Any]:
    """User turns with assistant slots between them; unless ``plain``, also system prompts, tools and greetings."""
    messages: list[dict[str, Any]] = []
    if not plain and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    if not plain and draw(st.booleans()):
        messages.append({"role": "assistant", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(mostly_texts)})
        if not plain and draw(st.booleans()):
            call = {"type": "function", "function": {"name": "f", "arguments": {"x": draw(texts)}}}
            messages += [{"role": "assistant", "content": draw(st.one_of(st.none(), texts)), "tool_calls": [call]},
                         {"role": "tool", "content": draw(texts)}]
        messages.append({"role": "assistant", "content": draw(texts)})
    return {"messages": messages} | ({"tools": TOOLS} if not plain and draw(st.booleans()) else {})


@st.composite
def replies(draw: st.DrawFn) -> tuple[Reply, Optional[list[int]]]:
    """What a server may say, with its token ids or without."""
    tokens = draw(st.none() | st.lists(st.integers(4, ROWS - 1).filter(lambda token: token != MASK), max_size=6))
    reason = draw(st.sampled_from(["stop", "stop", "stop", "stop", "length", "content_filter"]))
    if tokens and reason == "stop" and draw(st.booleans()):
        tokens = [*tokens, END]
    reasoning = draw(st.sampled_from(["", "", "because", "r\n"]))
    return Reply(draw(mostly_texts), reasoning, reason, None, tuple(tokens) if tokens else None), tokens


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, thinking: Optional[bool]) -> list[int]:
    options = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check(row: dict[str, Any], answers: list, strict: bool, thinking: Optional[bool], share: Optional[float]) -> int:
    """Answer one row as the job does and compare with what was served; returns the number of answers."""
    tokenizer = tiny_tokenizer(strict)
    renderer = Renderer(tokenizer, thinking)
    try:
        messages, tools = conversation(row)
    except RowRefused:
        return 0
    prompt = PromptRow("id", "chat", "train", "own", tuple(messages), tuple(tools) if tools else None)
    dialogue = Dialogue(prompt, AnswerLimits(50, 100_000, MASK, share))
    request = Request(Sampling(1.0, 1.0, 0, 0), thinking, (END, 0), ROWS)
    job = ServerJob(None, renderer, None, request, dialogue.limits, concurrency=1, failure_limit=1)  # type: ignore
    served, given_ids = [], []
    for reply, tokens in answers:
        try:
            if (asked := dialogue.next_prompt(renderer)) is None:
                break
            body = request.payload(dialogue, asked[1])
            switch = body.get("chat_template_kwargs", {}).get("enable_thinking")
            # What the server renders from the request, and what it then generates.
            served.append(rendered(tokenizer, body["messages"], body.get("tools"), switch))
            given_ids.append(tokens)
            dialogue.add(job._turn(asked[0], reply), renderer)
        except (TurnRefused, RenderError):
            break
    if not dialogue.turns:
        return 0
    result = dialogue.result()
    assert response_from_json(json.loads(dump_row(result.to_json())), "here") == response_from_json(
        json.loads(json.dumps(result.to_json())), "here")
    runs = sample_runs(result)
    covered = [np.zeros(len(run.ids), bool) for run in runs]
    for number, turn in enumerate(result.turns):
        begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids)
        assert list(turn.prompt_ids) == served[number]
        if given_ids[number]:
            assert list(turn.response_ids[:len(given_ids[number])]) == given_ids[number]
            assert turn.response_ids[len(given_ids[number]):] in ((), (END,))
        if turn.finish_reason == "length" and given_ids[number]:
            assert list(turn.response_ids) == given_ids[number]  # no stop is added
        homes = [index for index, run in enumerate(runs) if not covered[index][begin:end].any()
                 and run.ids[:end].tolist() == [*turn.prompt_ids, *turn.response_ids]]
        assert homes, "an answer that is in no sample behind its own prompt"
        assert runs[homes[0]].mask[begin:end].all()
        covered[homes[0]][begin:end] = True
    for run, mask in zip(runs, covered):
        assert (run.mask == mask).all() and mask.any() and not mask[0]
    return len(result.turns)


reached = {"answers": 0, "several": 0, "tools": 0}
quick = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@quick
@given(rows(plain=False), st.lists(replies(), min_size=1, max_size=4), st.sampled_from([None, True, False]),
       st.sampled_from([None, 0.0, 1.0]))
def any_conversation(row: dict, answers: list, thinking: Optional[bool], share: Optional[float]) -> None:
    turns = check(row, answers, False, thinking, share)
    reached["answers"] += turns
    reached["several"] += turns > 1
    reached["tools"] += turns > 0 and "tools" in row


def test_any_conversation() -> None:
    """The template drops earlier reasoning, so a later turn may need a sample of its own."""
    any_conversation()
    assert min(reached.values()) >= 10, reached  # the property was not true for want of answers


@quick
@given(rows(plain=True), st.lists(replies(), min_size=1, max_size=4))
def test_a_template_with_bos_that_opens_thinking(row: dict, answers: list) -> None:
    check(row, answers, True, None, None)
