"""Stage: the target's own answers to the prompts."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from deepspec import artifacts, distributed
from deepspec.config import paths
from deepspec.config.schema import MISSING, Config
from deepspec.data.dialogue import AnswerLimits
from deepspec.data.parts import PartWriter, answered, join_parts, mine, prepare_parts, prompt_key
from deepspec.data.progress import Progress
from deepspec.data.prompts import PromptRow, read_prompts
from deepspec.data.regenerate import answer_in_process
from deepspec.data.rendering import Renderer
from deepspec.data.rendezvous import Rendezvous, wait_for
from deepspec.data.responses import ERRORS_FILE, RESPONSES_FILE
from deepspec.data.server_job import Request, answer_from_servers
from deepspec.data.server_pool import BreakerOptions
from deepspec.errors import ConfigError, InputRefused, UserError
from deepspec.targets.frozen import FrozenTarget
from deepspec.targets.load import load_target, load_tokenizer, locate
from deepspec.targets.sampling import Sampling

log = logging.getLogger(__name__)

COMMAND = "data_prep/generate_responses.py"
# A small job is not stopped early for a handful of failures: they are reported at its end.
_PATIENCE = 20


def run(config: Config) -> None:
    """Answer every prompt that has no answer yet; write ``responses.jsonl`` when the last rank is done.

    Raises UserError when the share of failed rows passes ``responses.error_limit`` or the servers stop answering;
    finished rows are kept and the same command goes on from them, on any number of ranks.
    """
    directory = paths.responses_dir(config)
    source = artifacts.require_complete(paths.prompts_dir(config), "Prompts", "data_prep/collect_prompts.py")
    fingerprint = artifacts.canonical_hash({"key": paths.responses_key(config), "prompts": source.fingerprint})
    if artifacts.is_complete(directory, fingerprint):
        log.info("responses: up to date (%s)", directory)
        return
    backend = _Backend(config)
    prompts = list(read_prompts(paths.prompts_dir(config)))
    meeting = Rendezvous(directory, "responses")
    facts = backend.facts()
    if meeting.rank == 0:
        _refuse_other_answers(directory, facts)
        artifacts.begin(directory, "responses", fingerprint, inputs={"prompts": source.fingerprint}, facts=facts,
                        config=paths.responses_key(config), seed=config.run.seed)
    meeting.start(lambda: prepare_parts(directory, meeting.rank, meeting.world_size))
    done = answered(directory)
    rows = list(mine(prompts, done, meeting.rank, meeting.world_size))
    log.info("responses: %d of %d prompts to answer", sum(prompt_key(row) not in done for row in prompts), len(prompts))
    with PartWriter(directory, meeting.rank) as writer, Progress("responses", len(rows)) as progress:
        result = backend.answer(rows, writer, progress, len(prompts)) if rows else {}
    meeting.finish({**writer.counts, "seconds": progress.seconds, **result})
    if meeting.rank == 0:
        _conclude(config, directory, prompts, meeting.collect(), fingerprint)
    else:
        wait_for(lambda: artifacts.is_complete(directory, fingerprint), lambda: "responses: waiting for rank 0")
    meeting.end()


class _Backend:
    """Who answers: the target in this process, or servers (then only its tokenizer is loaded)."""

    def __init__(self, config: Config) -> None:
        self._config, self._options = config, config.responses
        self._target: Optional[FrozenTarget] = None
        cache = paths.model_cache(config)
        if self._options.backend == "in_process":
            self._target = load_target(config.target, device=distributed.device(), cache_dir=cache, features=False)
            tokenizer = self._target.tokenizer
        elif self._options.backend == "server":
            if not self._options.servers:
                raise ConfigError("responses.backend=server needs responses.servers, for example "
                                  "responses.servers=[http://localhost:8000/v1].")
            tokenizer = load_tokenizer(locate(config.target, cache), config.target)
        else:
            raise ConfigError(f"responses.backend={self._options.backend!r} is neither in_process nor server.")
        self.renderer = Renderer(tokenizer, config.target.thinking, config.target.name)
        mask_token_id = None if config.target.mask_token_id == MISSING else config.target.mask_token_id
        self._limits = AnswerLimits(self._options.max_tokens, config.data.max_length, mask_token_id,
                                    self._options.thinking_share)
        self._sampling = Sampling(self._options.temperature, self._options.top_p, self._options.top_k, config.run.seed)

    def facts(self) -> dict[str, Any]:
        """What later stages compare with their own."""
        return {
            "backend": self._options.backend, "renderer_hash": self.renderer.hash, "sampling": asdict(self._sampling),
            "template_kwargs": self.renderer.template_kwargs, "limits": asdict(self._limits),
            "target_fingerprint": self._target.fingerprint if self._target is not None else None,
        }

    def answer(self, rows: list[PromptRow], writer: PartWriter, progress: Progress, total: int) -> dict[str, Any]:
        """Answer ``rows`` of this rank, out of ``total`` of all ranks."""
        if self._target is not None:
            answer_in_process(self._target, self.renderer, rows, writer, limits=self._limits, sampling=self._sampling,
                              batch_size=self._options.batch_size, on_row=progress.add)
            return {}
        options, ends = self._options, (self.renderer.tokenizer.eos_token_id, self.renderer.end_of_turn_id)
        vocab_size = self._config.target.shape.vocab_size
        request = Request(self._sampling, self._config.target.thinking, tuple(end for end in ends if end is not None),
                          None if vocab_size == MISSING else vocab_size)
        return answer_from_servers(
            options.servers, iter(rows), self.renderer, writer, request, self._limits, model=options.model,
            concurrency=max(1, options.concurrency // distributed.world_size()), retries=options.retries,
            seconds_per_token=options.seconds_per_token,
            failure_limit=max(_PATIENCE, int(options.error_limit * total)), on_row=progress.add,
            breaker=BreakerOptions(options.breaker_failures, options.patience_seconds),
        )


def _refuse_other_answers(directory: Path, facts: dict[str, Any]) -> None:
    """Answers of an interrupted run can only be continued with the same renderer and target."""
    manifest = artifacts.read_manifest(directory)
    if manifest is None:
        return
    for name in ("renderer_hash", "target_fingerprint"):
        before, now = manifest.facts.get(name), facts[name]
        if before is not None and now is not None and before != now:
            raise InputRefused(f"{directory} has answers made with {name}={before}, but it is {now} now. Delete the "
                               "folder to answer all prompts again, or restore the target as it was.")


def _conclude(config: Config, directory: Path, prompts: list[PromptRow], results: list[dict[str, Any]],
              fingerprint: str) -> None:
    counts = join_parts(directory, prompts, drop_truncated=config.responses.truncated == "drop")
    share = (counts["failed"] + counts["missing"]) / len(prompts)
    summary = (f"{counts['rows']} of {len(prompts)} rows, {counts['tokens']} answer tokens, {counts['failed']} failed, "
               f"{counts['missing']} not tried, {counts['skipped']} skipped by rule, {counts['truncated']} cut at the "
               f"length limit, {counts['dropped_truncated']} dropped for that")
    if share > config.responses.error_limit or not counts["rows"]:
        raise UserError(
            f"responses: {summary}. Failures are {share:.1%}, responses.error_limit is "
            f"{config.responses.error_limit:.1%}; their causes are in {directory / ERRORS_FILE}. Run {COMMAND} again "
            f"to try the failed rows once more, or raise the limit."
        )
    manifest = artifacts.read_manifest(directory)
    assert manifest is not None and manifest.fingerprint == fingerprint, "another run uses this directory"
    seconds = max(float(result["seconds"]) for result in results)
    made = sum(int(result.get("tokens", 0)) for result in results)
    run_facts = {"seconds": round(seconds, 2), "tokens_per_second": round(made / seconds, 2), "ranks": len(results)}
    artifacts.complete(directory, manifest, [RESPONSES_FILE, ERRORS_FILE], {"counts": counts, "last_run": run_facts})
    log.info("responses: %s, in %s", summary, directory)
