"""From a conversation to the token ids the target sees. The only renderer there is: regeneration, training and
evaluation use it, so that their prompts agree token by token.

Text that spells a control token (``<|im_end|>`` in a user's message) becomes that token wherever the tokenizer does so;
serving engines do the same. Prompts that come to contain the mask token are refused by the response stage.
"""

import json
import logging
from functools import cached_property
from typing import Any, Optional, Sequence

from jinja2 import TemplateError

from deepspec.artifacts import canonical_hash
from deepspec.errors import InputRefused

log = logging.getLogger(__name__)

_PROBE = "deepspec-probe-answer"


class RenderError(ValueError):
    """The template refuses this conversation (roles that must alternate, say); other rows are not affected."""


class Renderer:
    """The tokenizer's own chat template. ``thinking`` is passed as ``enable_thinking`` unless it is None."""

    def __init__(self, tokenizer: Any, thinking: Optional[bool] = None, name: str = "the target") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputRefused(
                f"The tokenizer of {name} has no chat template. Give a file with one: target.chat_template=FILE"
            )
        self.tokenizer = tokenizer
        self.template_kwargs: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}

    def prompt_ids(self, messages: Sequence[dict[str, Any]],
                   tools: Optional[Sequence[dict[str, Any]]] = None, *, thinking: Optional[bool] = None) -> list[int]:
        """Everything before the target's first own token, generation prompt included; ``thinking`` of this
        conversation, if it is not to be the renderer's. Raises RenderError.

        The template writes the beginning-of-sequence token, so the tokenizer must not add another one: text and
        ids come from one ``apply_chat_template`` call, which sees to that.
        """
        ids = self._apply(messages, tools, tokenize=True, thinking=thinking)
        if not ids:
            raise RenderError("the chat template rendered no tokens")
        return ids

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Optional[Sequence[dict[str, Any]]], *, tokenize: bool,
               generation_prompt: bool = True, thinking: Optional[bool] = None) -> Any:
        options: dict[str, Any] = {"return_dict": False} if tokenize else {}
        options |= self.template_kwargs if thinking is None else {"enable_thinking": thinking}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=tokenize,
                add_generation_prompt=generation_prompt, **options,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            first = str(error).strip().split("\n")[0]
            raise RenderError(f"the chat template refused it ({type(error).__name__}: {first})") from None

    @cached_property
    def hash(self) -> str:
        """Identity of template, options and tokenizer: equal hashes render equal ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            vocabulary = json.loads(backend.to_str())
            # Set by whoever last asked for padding or truncation; our calls use neither.
            vocabulary = {key: value for key, value in vocabulary.items() if key not in ("padding", "truncation")}
        else:
            vocabulary = dict(self.tokenizer.get_vocab())
        special = {name: str(value) for name, value in self.tokenizer.special_tokens_map.items()}
        return canonical_hash({
            "template": self.tokenizer.chat_template, "kwargs": self.template_kwargs, "special": special,
            "tokenizer": canonical_hash(vocabulary),
        })

    @cached_property
    def end_of_turn_id(self) -> Optional[int]:
        """The token the template puts after an answer (``<|im_end|>``, ``<|eot_id|>``, ...); it need not be eos."""
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._apply(messages, None, tokenize=False, generation_prompt=False)
        except RenderError:
            text = ""
        _, found, rest = text.rpartition(_PROBE)
        ids = self.text_ids(rest.lstrip()) if found and rest.strip() else []
        if ids and (ids[0] in self.tokenizer.all_special_ids or ids[0] in self.tokenizer.added_tokens_decoder):
            return ids[0]
        return self.tokenizer.eos_token_id

    def text_ids(self, text: str) -> list[int]:
        """Ids of a piece of text; nothing is added around it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """Text of an answer, without control tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)
