"""Token ids of conversations."""

import pytest
from tiny_data import CHAT_TEMPLATE, END, tiny_tokenizer

from deepspec.data.prompt_rows import conversation
from deepspec.data.rendering import Renderer, RenderError
from deepspec.errors import InputRefused

USER = {"role": "user", "content": "hello"}


def test_ids_are_those_of_the_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    for thinking, ending in ((False, "<think>\n\n</think>\n\n"), (None, "assistant\n"), (True, "assistant\n")):
        ids = Renderer(tokenizer, thinking).prompt_ids([USER])
        assert tokenizer.decode(ids).endswith(ending)
    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert Renderer(tokenizer).prompt_ids([USER]) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_exactly_one_bos() -> None:
    tokenizer = tiny_tokenizer(strict=True)
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # the post-processor adds one
    ids = Renderer(tokenizer).prompt_ids([USER])
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_a_refusal_of_the_template_is_an_error_of_the_row() -> None:
    with pytest.raises(RenderError, match="roles must alternate"):
        Renderer(tiny_tokenizer(strict=True)).prompt_ids([USER, USER])


def test_a_tokenizer_without_template_names_the_option() -> None:
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.chat_template = None
    with pytest.raises(InputRefused, match="mymodel has no chat template.*target.chat_template"):
        Renderer(tokenizer, False, "mymodel")


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_calls_render_alike_without_content(content: dict) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
    row = {"messages": [{"role": "system", "content": "s"}, USER, call | content, {"role": "tool", "content": "7"},
                        {"role": "assistant", "content": "seven"}], "tools": tools}
    messages, found = conversation(row)
    tokenizer = tiny_tokenizer()
    ids = Renderer(tokenizer).prompt_ids(messages[:-1], found)
    text = tokenizer.decode(ids)
    original = [row["messages"][0], USER, call | {"content": ""}, {"role": "tool", "content": "7"}]
    assert text == tokenizer.apply_chat_template(original, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "<tool_call>" in text and "None" not in text


def test_the_hash_sees_template_options_and_vocabulary() -> None:
    tokenizer = tiny_tokenizer()
    base = Renderer(tokenizer).hash
    assert base == Renderer(tiny_tokenizer.__wrapped__()).hash
    assert base != Renderer(tokenizer, False).hash
    tokenizer(["a", "b c d e"], padding=True)  # leaves padding switched on in the backend
    assert base == Renderer(tokenizer).hash
    other = tiny_tokenizer.__wrapped__()
    other.chat_template = CHAT_TEMPLATE + " "
    assert base != Renderer(other).hash
    grown = tiny_tokenizer.__wrapped__()
    grown.add_tokens(["newtoken"])
    assert base != Renderer(grown).hash


def test_the_end_of_turn_need_not_be_eos() -> None:
    renderer = Renderer(tiny_tokenizer())
    assert renderer.end_of_turn_id == END != renderer.tokenizer.eos_token_id


def test_control_tokens_in_text_are_what_the_tokenizer_makes_of_them() -> None:
    tokenizer = tiny_tokenizer()
    ids = Renderer(tokenizer).prompt_ids([{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(END) == 2
