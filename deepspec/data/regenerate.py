"""Answers of the target, decoded in this process."""

from dataclasses import dataclass
from typing import Optional, Sequence

from deepspec.data.dialogue import THINK_OPEN, AnswerLimits, Dialogue, TurnRefused, TurnSkipped, opens_thinking
from deepspec.data.parts import PartWriter
from deepspec.data.progress import RowCallback
from deepspec.data.prompts import PromptRow
from deepspec.data.rendering import Renderer, RenderError
from deepspec.data.responses import Turn
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.generate import GenerateRequest, GenerateResult, generate
from deepspec.targets.sampling import Sampling

# Rows answered together before the next ones start: bounds what a kill loses of conversations with several turns.
_CHUNK_BATCHES = 8


def turn_from_ids(prompt_ids: Sequence[int], result: GenerateResult, renderer: Renderer,
                  stop_ids: Sequence[int]) -> Turn:
    """A decoded answer with its text; the prompt's opening think tag belongs to the text of the answer."""
    ids = list(result.response_ids)
    spoken = ids[:-1] if result.finish_reason == "stop" and ids and ids[-1] in stop_ids else ids
    text = renderer.text(spoken)
    if opens_thinking(prompt_ids, renderer) and not text.startswith(THINK_OPEN):
        text = THINK_OPEN + text
    return Turn(tuple(prompt_ids), tuple(ids), result.finish_reason, text)


def answer_in_process(target: FrozenTarget, renderer: Renderer, rows: Sequence[PromptRow], writer: PartWriter, *,
                      limits: AnswerLimits, sampling: Sampling, batch_size: int,
                      on_row: Optional[RowCallback] = None) -> None:
    """Answer every slot of ``rows`` and write each row when its last slot is answered.

    ``on_row(tokens, failed=...)`` is called per finished or failed row.
    """
    chunk = max(1, _CHUNK_BATCHES * batch_size)
    job = _Job(renderer, writer, on_row)
    for start in range(0, len(rows), chunk):
        waiting = [Dialogue(row, limits) for row in rows[start:start + chunk]]
        while waiting:
            asked = job.requests(waiting)
            requests = [GenerateRequest(name, ids, most) for name, (_, ids, most) in asked.items()]
            waiting = []
            for result in generate(target, requests, sampling, batch_size):
                dialogue, prompt_ids, _ = asked[result.id]
                turn = turn_from_ids(prompt_ids, result, renderer, target.spec.eos_token_ids)
                if job.take(dialogue, turn):
                    waiting.append(dialogue)


@dataclass(frozen=True)
class _Job:
    renderer: Renderer
    writer: PartWriter
    on_row: Optional[RowCallback]

    def requests(self, dialogues: Sequence[Dialogue]) -> dict[str, tuple[Dialogue, list[int], int]]:
        """(dialogue, prompt ids, most tokens) by request id, of those that go on."""
        asked = {}
        for dialogue in dialogues:
            try:
                prompt = dialogue.next_prompt(self.renderer)
            except (TurnRefused, RenderError) as refusal:
                self._fail(dialogue, refusal)
                continue
            if prompt is None:
                self._finish(dialogue)
            else:
                asked[dialogue.request_id] = (dialogue, *prompt)
        return asked

    def take(self, dialogue: Dialogue, turn: Turn) -> bool:
        """Add an answer; whether the conversation goes on."""
        try:
            dialogue.add(turn, self.renderer)
        except TurnRefused as refusal:
            self._fail(dialogue, refusal)
            return False
        if dialogue.finished:
            self._finish(dialogue)
        return not dialogue.finished

    def _finish(self, dialogue: Dialogue) -> None:
        self.writer.answer(dialogue.result())
        self._report(sum(len(turn.response_ids) for turn in dialogue.turns))

    def _fail(self, dialogue: Dialogue, reason: Exception) -> None:
        skipped = isinstance(reason, TurnSkipped)
        self.writer.fail(dialogue.row.id, str(reason), skipped=skipped)
        self._report(0, failed=not skipped)

    def _report(self, tokens: int, *, failed: bool = False) -> None:
        if self.on_row is not None:
            self.on_row(tokens, failed=failed)
