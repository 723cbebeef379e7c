"""Answers of the target from OpenAI-compatible servers: many rows in flight, each written as soon as it is whole."""

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence

from deepspec.data.dialogue import (
    THINK_CLOSE, THINK_OPEN, AnswerLimits, Dialogue, TurnRefused, TurnSkipped, after_prompt, join_reasoning,
    opens_thinking,
)
from deepspec.data.parts import PartWriter
from deepspec.data.progress import RowCallback
from deepspec.data.prompts import PromptRow
from deepspec.data.rendering import Renderer, RenderError
from deepspec.data.responses import Turn
from deepspec.data.server import ChatClient, Reply, RowRejected
from deepspec.data.server_pool import DEFAULT_BREAKER, BreakerOptions, ServersDead
from deepspec.errors import UserError
from deepspec.targets.sampling import Sampling

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What every request of a job has in common."""

    sampling: Sampling
    thinking: Optional[bool]
    stop_ids: tuple[int, ...]
    vocab_size: Optional[int] = None

    def payload(self, dialogue: Dialogue, max_tokens: int) -> dict[str, Any]:
        """Body of one chat completion, without the model."""
        seed = hashlib.blake2b(f"{self.sampling.seed}\x1f{dialogue.request_id}".encode(), digest_size=4).digest()
        body: dict[str, Any] = {
            "messages": dialogue.messages(), "max_tokens": max_tokens, "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p, "seed": int.from_bytes(seed, "little") >> 1, "return_token_ids": True,
        }
        if self.sampling.top_k:
            body["top_k"] = self.sampling.top_k
        thinking = self.thinking if dialogue.thinking is None else dialogue.thinking
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        if dialogue.row.tools:
            body["tools"] = list(dialogue.row.tools)
        return body


class ServerJob:
    """Answers rows with at most ``concurrency`` in flight; memory does not grow with the number of rows."""

    def __init__(self, client: ChatClient, renderer: Renderer, writer: PartWriter, request: Request,
                 limits: AnswerLimits, *, concurrency: int, failure_limit: int,
                 on_row: Optional[RowCallback] = None) -> None:
        self._client, self._renderer, self._writer = client, renderer, writer
        self._request, self._limits, self._concurrency = request, limits, concurrency
        self._failure_limit, self._on_row = failure_limit, on_row
        self.unbalanced = 0
        self.retokenised = 0  # answers without token ids

    async def run(self, rows: Iterator[PromptRow]) -> None:
        """Answer all rows. Raises UserError when the servers are gone or failures pass the limit; what is finished by
        then stays finished, and no other row is marked."""
        workers = [asyncio.create_task(self._work(rows)) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if self.unbalanced:
            log.warning("%d answers closed a think tag that they had not opened; it was added", self.unbalanced)
        if self.retokenised:
            log.warning("%d answers came without token ids (the server does not know return_token_ids): their text was "
                        "tokenised here, which now and then gives other tokens than were sampled", self.retokenised)

    async def _work(self, rows: Iterator[PromptRow]) -> None:
        for row in rows:
            try:
                dialogue = await self._answer(row)
            except ServersDead as error:
                raise UserError(
                    f"The servers stopped answering: {error}. {self._writer.counts['answered']} rows are finished and "
                    f"kept, those under way are not marked. Start the servers and run the same command again: it "
                    f"continues from there."
                ) from None
            except (RowRejected, TurnRefused, RenderError) as error:
                self._fail(row.id, str(error), skipped=isinstance(error, TurnSkipped))
                continue
            self._writer.answer(dialogue.result())
            self._report(sum(len(turn.response_ids) for turn in dialogue.turns))

    async def _answer(self, row: PromptRow) -> Dialogue:
        dialogue = Dialogue(row, self._limits)
        while (prompt := dialogue.next_prompt(self._renderer)) is not None:
            prompt_ids, most = prompt
            reply = await self._client.ask(self._request.payload(dialogue, most), row.id)
            dialogue.add(self._turn(prompt_ids, reply), self._renderer)
        return dialogue

    def _turn(self, prompt_ids: list[int], reply: Reply) -> Turn:
        if reply.finish_reason not in ("stop", "length", "tool_calls"):
            raise TurnRefused(f"finish reason {reply.finish_reason!r}")
        seen = reply.prompt_tokens if reply.prompt_ids is None else len(reply.prompt_ids)
        if list(reply.prompt_ids or prompt_ids) != prompt_ids or seen not in (None, len(prompt_ids)):
            raise TurnRefused(
                f"the server rendered {seen} prompt tokens that differ from the {len(prompt_ids)} rendered here: its "
                f"chat template, or its default for thinking, is another one"
            )
        if reply.response_ids is None and reply.finish_reason == "tool_calls":
            raise TurnRefused("a tool call without token ids; the server must support return_token_ids")
        opened = opens_thinking(prompt_ids, self._renderer)
        text, repaired = join_reasoning(reply.content, reply.reasoning, cut=reply.finish_reason == "length")
        self.unbalanced += (repaired and not opened) + (THINK_OPEN in text and THINK_CLOSE not in text
                                                        and reply.finish_reason == "stop")
        if reply.response_ids is not None:
            ids = list(reply.response_ids)
            if not text.strip():
                text = self._renderer.text(ids)
        else:
            text = _whole_characters(text, reply.finish_reason)
            ids = self._renderer.text_ids(after_prompt(text, opened)) if text.strip() else []
            self.retokenised += 1
        end = self._renderer.end_of_turn_id
        if reply.finish_reason == "stop" and end is not None and ids and ids[-1] not in self._request.stop_ids:
            ids.append(end)  # re-tokenised text, or a server that keeps its stop token to itself
        wrong = [token for token in ids if self._request.vocab_size is not None and token >= self._request.vocab_size]
        if wrong:
            raise TurnRefused(f"the server returned token id {wrong[0]}, the target has only "
                              f"{self._request.vocab_size} rows")
        return Turn(tuple(prompt_ids), tuple(ids), reply.finish_reason, text)

    def _fail(self, prompt_id: str, reason: str, *, skipped: bool = False) -> None:
        self._writer.fail(prompt_id, reason, skipped=skipped)
        self._report(0, failed=not skipped)
        if self._writer.counts["failed"] > self._failure_limit:
            raise UserError(
                f"{self._writer.counts['failed']} rows failed, more than responses.error_limit allows for the whole "
                f"job; the last one, {prompt_id!r}: {reason}. Finished rows are kept; failed ones are tried again by "
                f"the next run."
            )

    def _report(self, tokens: int, *, failed: bool = False) -> None:
        if self._on_row is not None:
            self._on_row(tokens, failed=failed)


def _whole_characters(text: str, finish_reason: str) -> str:
    """Text that can be tokenised again. Raises TurnRefused where the server could not put bytes into characters:
    which tokens they came from is lost. At the end of a cut answer these are only the last, unfinished one."""
    if finish_reason == "length":
        text = text.rstrip("\ufffd")
    if "\ufffd" in text:
        raise TurnRefused("the answer has bytes that are no text (U+FFFD), and the server gives no token ids")
    return text


def answer_from_servers(urls: Sequence[str], rows: Iterator[PromptRow], renderer: Renderer, writer: PartWriter,
                        request: Request, limits: AnswerLimits, *, model: Optional[str], concurrency: int, retries: int,
                        seconds_per_token: float, failure_limit: int, retry_wait: float = 0.5,
                        breaker: BreakerOptions = DEFAULT_BREAKER,
                        on_row: Optional[RowCallback] = None) -> dict[str, Any]:
    """Answer ``rows``; returns {model, requests, unbalanced, retokenised, servers}. Raises InputRefused if no
    server is there at the start, UserError if they stop answering or too many rows fail."""

    async def job() -> dict[str, Any]:
        client = ChatClient(urls, model=model, retries=retries, seconds_per_token=seconds_per_token,
                            connections=concurrency, retry_wait=retry_wait, breaker=breaker)
        async with client:
            name = await client.connect()
            work = ServerJob(client, renderer, writer, request, limits, concurrency=concurrency,
                             failure_limit=failure_limit, on_row=on_row)
            await work.run(rows)
            servers = {server.url: {"requests": server.requests, "opened": server.opened} for server in client.servers}
            return {"model": name, "requests": client.requests, "unbalanced": work.unbalanced,
                    "retokenised": work.retokenised, "servers": servers}

    return asyncio.run(job())
