"""Stage: draft held-out prompts, keep what the confidence said and what the target decided, refit the head if asked."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Iterable, Iterator, Optional, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepspec import distributed
from deepspec.artifacts import atomic_write_json, begin, canonical_hash, complete
from deepspec.calibration import (
    ConfidenceRecords, RecordsOrigin, auc, brier, fit_temperatures, sigmoid, split_conversations, survival_probability,
    temperature_grid,
)
from deepspec.calibration.compare import compare_heads
from deepspec.calibration.fit import cumulative_ece
from deepspec.calibration.head import CONFIDENCE_DIR, HEAD_FILE, head_from_tensors, read_head, save_head, set_head
from deepspec.calibration.refit import LinearHead, RefitResult, refit_head
from deepspec.config.paths import responses_dir, run_dir
from deepspec.config.schema import CalibrationConfig, Config
from deepspec.data.progress import Progress
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest, DecodeResult
from deepspec.errors import InputRefused
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.checkpoint import MODEL
from deepspec.training.session import RunSession, load_run

log = logging.getLogger(__name__)
RECORDS_FILE, SUMMARY_FILE = "records.npz", "summary.json"
RULE = ("the head whose Brier score against the actual outcomes, over the positions reached in a quarter of the refit "
        "conversations, is lower; a tie keeps the jointly trained one")
_SEED_OFFSET = 7919  # other draws than evaluation's on the same prompts
_FLOAT16_MAX = 65504.0


def known_positions(known: int, previous_ids: NDArray[np.int64], stop_ids: frozenset[int]) -> int:
    """Leading positions of a block that count, whatever the target decided.

    A drafted end-of-turn token ends the answer if it is accepted, and then nothing is known of what follows it. The cut
    must not depend on the outcome, or rejected blocks would be over-represented behind it, so it is made in both cases.
    """
    for place, token in enumerate(previous_ids[1:].tolist(), start=1):
        if token in stop_ids:
            return min(known, place)
    return known


def _head_inputs(drafter: Any, hidden: NDArray[np.float16], previous_ids: NDArray[np.int64]) -> NDArray[np.float16]:
    """[n, K, F]: ``[h_k ; W_1[x_{k-1}]]`` of Eq. 7."""
    if not drafter.shape.confidence_with_markov:
        return hidden
    device = drafter.confidence_head.proj.weight.device
    with torch.no_grad():
        embedded = drafter.markov_head.embed(torch.from_numpy(previous_ids).to(device)).float().cpu().numpy()
    return np.concatenate([hidden, np.clip(embedded, -_FLOAT16_MAX, _FLOAT16_MAX).astype(np.float16)], axis=-1)


def records_of(results: Sequence[DecodeResult], drafter: Any, origin: RecordsOrigin, stop_ids: frozenset[int], *,
               inputs: bool) -> Optional[ConfidenceRecords]:
    """Records of all drafted rounds of finished answers, None if there was none."""
    rounds = [(result, item, item.detail, item.confidence_logits) for result in results for item in result.rounds]
    kept = [(result, item, detail, logits) for result, item, detail, logits in rounds
            if item.drafted and detail is not None and logits is not None]
    if not kept:
        return None
    details = [detail for _, _, detail, _ in kept]
    previous = np.stack([detail.previous_ids for detail in details])
    drafted = np.array([known_positions(item.known, detail.previous_ids, stop_ids) for _, item, detail, _ in kept])
    head_inputs = None
    if inputs:
        hidden = np.stack([np.clip(detail.hidden, -_FLOAT16_MAX, _FLOAT16_MAX) for detail in details])
        head_inputs = _head_inputs(drafter, hidden.astype(np.float16), previous)
    return ConfidenceRecords(
        origin=origin,
        logits=np.stack([logits for _, _, _, logits in kept]).astype(np.float32),
        accepted=np.minimum([item.accepted for _, item, _, _ in kept], drafted).astype(np.int64),
        drafted=drafted.astype(np.int64),
        analytic_rate=np.stack([detail.analytic_rate for detail in details]).astype(np.float32),
        conversation=np.array([result.id for result, _, _, _ in kept]),
        domain=np.array([result.domain for result, _, _, _ in kept]),
        inputs=head_inputs,
    )


def _groups(requests: list[DecodeRequest], size: int) -> Iterator[list[DecodeRequest]]:
    return (requests[start:start + size] for start in range(0, len(requests), size))


def _counted(results: Iterable[DecodeResult], progress: Progress) -> Iterator[DecodeResult]:
    """``results``, shown in ``progress`` as they come, with the acceptance length so far."""
    rounds = accepted = 0
    for result in results:
        rounds += len(result.rounds)
        accepted += sum(record.accepted for record in result.rounds)
        progress.add(len(result.token_ids), note=f"{1 + accepted / max(1, rounds):.2f} tokens/round")
        yield result


def collect(config: Config, session: RunSession) -> Optional[ConfidenceRecords]:
    """Decode held-out prompts with every draft token verified; prompts are shared out over the ranks.

    Whole groups of prompts are decoded until ``confidence.max_blocks`` is reached, because stopping in the middle of a
    group would keep its short answers only. Returns all ranks' records on rank 0, this rank's own elsewhere.
    """
    options, target, drafter = config.confidence, session.target, session.drafter
    length = drafter.shape.draft_length
    origin = RecordsOrigin(length, session.drafter_sha256, options.temperature, (1.0,) * length,
                           thinking=config.target.thinking)
    sampling = Sampling(temperature=options.temperature, seed=config.run.seed + _SEED_OFFSET)
    decoder = SpeculativeDecoder(target, drafter, sampling, batch_size=options.batch_size,
                                 max_new_tokens=options.max_new_tokens, mode="fixed", record=True)
    requests = held_out_requests(config, options.max_prompts, target.tokenizer)
    mine = requests[distributed.rank()::distributed.world_size()]
    parts: list[ConfidenceRecords] = []
    blocks = 0
    with Progress("confidence", len(mine), "prompts") as progress:
        for group in _groups(mine, 2 * options.batch_size):
            results = list(_counted(decoder.decode(group), progress))
            part = records_of(results, drafter, origin, frozenset(target.spec.eos_token_ids), inputs=options.refit)
            if part is not None:
                parts.append(part)
                blocks += len(part)
            if blocks * distributed.world_size() >= options.max_blocks:
                break
    gathered: Optional[list[Any]] = distributed.gather_objects(parts)
    parts = parts if gathered is None else [part for own in gathered for part in own]
    if distributed.rank() == 0 and not parts:
        raise InputRefused(f"none of the {len(mine)} held-out prompts led to a drafted block: every answer ended with "
                           "its first token. Look at the responses, or raise confidence.max_new_tokens.")
    if not parts:
        return None
    records = ConfidenceRecords.concatenate(parts)
    # By conversation, so that the records and all that is fitted on them are the same on any number of ranks.
    return records.select(np.argsort(records.conversation, kind="stable"))


def measure(fit: ConfidenceRecords, report: ConfidenceRecords,
            options: CalibrationConfig) -> dict[str, list[Optional[float]]]:
    """Per position on the report part, undefined values None.

    ``auc`` among blocks that reached the position; ``brier`` and ``ece`` of the cumulative product against "survived
    through k"; ``ece_scaled`` the same ECE after temperatures fitted on the fit part.
    """
    survival = survival_probability(sigmoid(report.logits))
    num_bins = options.num_bins
    grid = temperature_grid(options.grid_min, options.grid_max, options.grid_points)
    scaling = fit_temperatures(fit.logits, fit.accepted, fit.drafted, grid=grid, num_bins=num_bins, warn=False,
                               min_samples=options.min_samples, noise_guard=options.noise_guard)
    columns: dict[str, list[float]] = {
        "ece": cumulative_ece(report, 1.0, num_bins),
        "ece_scaled": cumulative_ece(report, scaling.temperatures, num_bins), "brier": [], "auc": [],
    }
    for k in range(report.origin.block_length):
        known, reached = report.known[:, k], report.reached[:, k]
        columns["brier"].append(brier(survival[known, k], report.survived[known, k]))
        columns["auc"].append(auc(report.logits[reached, k], report.survived[reached, k]))
    return {name: [value if np.isfinite(value) else None for value in values] for name, values in columns.items()}


def _rates(records: ConfidenceRecords) -> dict[str, list[Optional[float]]]:
    """Among blocks that reached a position: share accepted, and mean analytic rate (Eq. 8). They must agree."""
    observed, analytic = [], []
    for k in range(records.origin.block_length):
        reached = records.reached[:, k] & np.isfinite(records.analytic_rate[:, k])
        count = int(reached.sum())
        observed.append(float(records.survived[reached, k].mean()) if count else None)
        analytic.append(float(records.analytic_rate[reached, k].mean()) if count else None)
    return {"observed_rate": observed, "analytic_rate": analytic}


def choose_head(records: ConfidenceRecords, joint: LinearHead,
                config: Config) -> tuple[ConfidenceRecords, Optional[RefitResult], dict[str, Any]]:
    """Refit if asked; returns the records scored by the chosen head, the refit, and the content of summary.json.

    Raises InputRefused where a part of the division would have no conversation.
    """
    options = config.confidence
    part = split_conversations(records.conversation, records.domain, fit_fraction=config.calibration.fit_fraction,
                               refit_fraction=options.refit_fraction if options.refit else 0.0)
    needed = [*(["refit"] if options.refit else []), "fit", "report"]
    if lacking := [name for name in needed if not (part == name).any()]:
        raise InputRefused(
            f"{len(set(records.conversation.tolist()))} conversations are too few to refit, fit and measure: "
            f"none is left for {' and '.join(lacking)}. Nothing was changed. Give more prompts (confidence.prompts, "
            "confidence.max_prompts), raise data.min_held_out, or set confidence.refit=false.")
    fit, report = (records.select(part == name) for name in ("fit", "report"))
    bins = config.calibration.num_bins
    names, counts = np.unique(records.domain, return_counts=True)
    summary: dict[str, Any] = {
        "schema_version": 1, "blocks": len(records), "conversations": len(set(records.conversation.tolist())),
        "domains": {str(name): int(count) for name, count in zip(names, counts)}, "temperature": options.temperature,
        "blocks_per_split": {name: int((part == name).sum()) for name in ("refit", "fit", "report")},
        "chosen": "joint", "rule": RULE if options.refit else "no refit was asked for",
        "joint": measure(fit, report, config.calibration), "refit": None, **_rates(records),
    }
    if not options.refit or records.inputs is None:
        return records, None, summary
    result = refit_head(records.select(part == "refit"), joint, epochs=options.epochs, lr=options.lr,
                        seed=config.run.seed)
    rescored = records.with_logits(result.head.logits(records.inputs), "refit")
    values = {name: value for name, value in asdict(result).items() if name not in ("head", "chosen")}
    summary |= {
        "chosen": result.chosen,
        "refit": measure(rescored.select(part == "fit"), rescored.select(part == "report"),
                         config.calibration),
        "comparison": compare_heads(report, report.logits, rescored.logits[part == "report"], num_bins=bins,
                                    draws=config.calibration.bootstrap, seed=config.run.seed) if len(report) else None,
        "validation": {name: None if isinstance(value, float) and not np.isfinite(value) else value
                       for name, value in values.items()},
    }
    return rescored if result.chosen == "refit" else records, result, summary


def _log_comparison(summary: dict[str, Any]) -> None:
    log.info("report split: %d blocks; head used: %s", summary["blocks_per_split"]["report"], summary["chosen"])
    for name in ("joint", "refit"):
        if summary[name] is None:
            continue
        means = {}
        for column, values in summary[name].items():
            present = [value for value in values if value is not None]
            means[column] = sum(present) / len(present) if present else float("nan")
        log.info("  %-5s head, means over positions: AUC %.3f  Brier %.4f  ECE %.4f, %.4f after temperature scaling",
                 name, means["auc"], means["brier"], means["ece"], means["ece_scaled"])
    for name, entry in (summary.get("comparison") or {}).items():
        if entry["difference"] is not None:
            low, high = entry["difference_ci95"] or (float("nan"), float("nan"))
            log.info("  refit minus joint, %s: %+.4f (95 %% interval %+.4f to %+.4f)", name, entry["difference"], low,
                     high)


def run(config: Config) -> None:
    """Write ``confidence/``: records.npz, summary.json, and head.safetensors if the refitted head is the better one."""
    if not config.drafter.confidence_head:
        log.info("this drafter has no confidence head: nothing to fit")
        return
    started = time.perf_counter()
    session = load_run(config)
    joint = read_head(session.checkpoint / MODEL)
    set_head(session.drafter, joint)  # an earlier refit may have been put in place
    records = collect(config, session)
    if distributed.rank() != 0 or records is None:
        return
    records, result, summary = choose_head(records, head_from_tensors(joint), config)
    _write(config, records, result, summary | {"seconds": round(time.perf_counter() - started, 2)})
    _log_comparison(summary)


def _write(config: Config, records: ConfidenceRecords, result: Optional[RefitResult], summary: dict[str, Any]) -> None:
    directory: Path = run_dir(config) / CONFIDENCE_DIR
    sha256 = records.origin.drafter_sha256
    key = {"drafter": sha256, "confidence": asdict(config.confidence), "calibration": config.calibration.fit_fraction,
           "seed": config.run.seed, "responses": str(responses_dir(config).name)}
    manifest = begin(directory, "confidence", canonical_hash(key), inputs={"drafter": sha256}, config=asdict(config),
                     seed=config.run.seed, facts={"drafter_sha256": sha256, "chosen": summary["chosen"]})
    files = [RECORDS_FILE, SUMMARY_FILE]
    (directory / HEAD_FILE).unlink(missing_ok=True)
    records.save(directory / RECORDS_FILE)
    atomic_write_json(directory / SUMMARY_FILE, summary)
    if result is not None and result.chosen == "refit":
        save_head(directory / HEAD_FILE, result.head)
        files.append(HEAD_FILE)
    complete(directory, manifest, files)
