"""Whether the server makes the same prompts of a conversation as the drafter was trained on."""

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence

from deepspec.doctor.endpoint import Engine
from deepspec.doctor.findings import NOTE, Finding
from deepspec.doctor.reference import Prompt


@dataclass(frozen=True)
class Rendering:
    """The server's token ids of the reference conversations as a plain client asks; None: it does not tell."""

    plain: Optional[list[list[int]]]
    findings: tuple[Finding, ...]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def _say(prompt: Prompt, theirs: Sequence[int], tokenizer: Any) -> str:
    place = _first_difference(prompt.ids, theirs)
    texts = [tokenizer.decode(list(ids)[place:place + 8]) for ids in (prompt.ids, theirs)]
    return (f"prompt {prompt.id}: {len(theirs)} tokens at the server, {len(prompt.ids)} in training; from token "
            f"{place} on the server has {texts[1]!r}, training had {texts[0]!r}")


def check_rendering(engine: Engine, prompts: Sequence[Prompt], options: Mapping[str, Any],
                    tokenizer: Any) -> Rendering:
    """Compare the server's prompts with ours; ``options`` are what training passed to the template."""
    plain: list[list[int]] = []
    for prompt in prompts:
        ids = engine.render(prompt.messages, {})
        if ids is None:
            return Rendering(None, (Finding(
                "chat_template", "the server does not return the token ids of a conversation, so its chat template "
                "was not compared", "Compare usage.prompt_tokens of a request with the run's prompts.", NOTE,
                "server"),))
        plain.append(ids)
    wrong = [place for place, (prompt, ids) in enumerate(zip(prompts, plain)) if list(prompt.ids) != ids]
    if not wrong:
        return Rendering(plain, ())
    first = prompts[wrong[0]]
    told = {place: engine.render(prompts[place].messages, options) for place in wrong} if options else {}
    if told and all(ids == list(prompts[place].ids) for place, ids in told.items()):
        text = ", ".join(f"{key}: {str(value).lower()}" for key, value in options.items())
        return Rendering(plain, (Finding(
            "thinking", f"a request without chat_template_kwargs is rendered differently from training "
            f"({_say(first, plain[wrong[0]], tokenizer)})",
            f"Clients must send chat_template_kwargs {{{text}}}, or the server must start with "
            "--default-chat-template-kwargs; or train for the mode that is served (target.thinking).",
            found_by="server"),))
    return Rendering(plain, (Finding(
        "chat_template", f"the server's chat template makes other prompts ({len(wrong)} of {len(prompts)} differ; "
        f"{_say(first, plain[wrong[0]], tokenizer)})",
        "Start the server with the template the run used (--chat-template FILE), or regenerate the training answers "
        "through this server.", found_by="server"),))
