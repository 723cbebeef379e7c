"""Stage: how long rounds of this target and drafter take, on this machine or on a server that runs."""

import logging
from typing import Any, Callable, Optional

from deepspec import distributed
from deepspec.artifacts import begin, canonical_hash, complete
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config
from deepspec.data.progress import Progress
from deepspec.decoding.cost import ProfileCell, read_cells
from deepspec.profiling.extras import ExtrasSampler
from deepspec.profiling.files import RECORDS_FILE, SPS_FILE, conditions, write_profile
from deepspec.profiling.measure import Measurement, grid, measure
from deepspec.profiling.runner import DecoderRunner
from deepspec.profiling.served import Http, measure_server
from deepspec.profiling.sglang import SglangEngine
from deepspec.profiling.vllm import VllmEngine
from deepspec.scheduling import SpsTable
from deepspec.training.checkpoint import drafter_sha256, read_state
from deepspec.training.session import chosen_checkpoint, load_run

log = logging.getLogger(__name__)
_ENGINES: dict[str, Callable[..., Any]] = {"sglang": SglangEngine, "vllm": VllmEngine}


def run(config: Config) -> None:
    """Measure the grid on rank 0 (other ranks idle, so that nothing disturbs it) and write ``profile/``."""
    if distributed.rank() != 0:
        return
    if config.profile.source == "in_process":
        _in_process(config)
    else:
        _served(config)


def _in_process(config: Config) -> None:
    session, options = load_run(config), config.profile
    shapes = grid(options, session.drafter.shape.draft_length)
    runner = DecoderRunner(session.target, session.drafter, config.run.seed)
    with _bar(len(shapes) * options.samples_per_cell) as bar:
        extras = ExtrasSampler(runner, options, seed=config.run.seed)
        measured = measure(runner, shapes, options, seed=config.run.seed, progress=bar.update, each_pass=extras.sample)
    _write(config, measured, conditions(session.target), session.drafter_sha256, extras.result())


def _served(config: Config) -> None:
    """Profile the server at ``profile.endpoint``, taken to serve this run's target and drafter."""
    options = config.profile
    engine = _ENGINES[options.source](Http.open(options.endpoint), seed=config.run.seed,
                                      vocab_size=config.target.shape.vocab_size)
    checkpoint = chosen_checkpoint(config)
    sha256 = drafter_sha256(checkpoint, config.export.weights)
    header = engine.conditions() | {"target_sha256": str(read_state(checkpoint).identity.get("target_fingerprint"))}
    earlier = _earlier(config, header | {"drafter_sha256": sha256}) if options.extend else []
    with _bar(len(engine.shapes(options)) * options.samples_per_cell) as bar:
        measured = measure_server(engine, options, seed=config.run.seed, progress=bar.update)
    shapes = {(cell.num_reqs, cell.verify_tokens, cell.kv_len) for cell in measured.cells}
    kept = [cell for cell in earlier if (cell.num_reqs, cell.verify_tokens, cell.kv_len) not in shapes]
    _write(config, Measurement((*kept, *measured.cells), measured.partial), header, sha256, None)


def _earlier(config: Config, header: dict[str, Any]) -> list[ProfileCell]:
    """Cells that ``profile.extend`` keeps. Raises InputRefused if they were measured under other conditions."""
    directory = run_dir(config) / "profile"
    if not (directory / RECORDS_FILE).is_file():
        return []
    SpsTable.require(directory / SPS_FILE, **header)
    return read_cells(directory / RECORDS_FILE)


def _bar(total: int) -> Progress:
    return Progress("profile", total, "rounds")


def _write(config: Config, measured: Measurement, header: dict[str, Any], sha256: str,
           extras: Optional[dict[str, Any]]) -> None:
    directory, options = run_dir(config) / "profile", config.profile
    shapes = [(cell.num_reqs, cell.verify_tokens, cell.kv_len) for cell in measured.cells]
    manifest = begin(directory, "profile", canonical_hash(header | {"drafter": sha256, "cells": shapes}),
                     seed=config.run.seed, config=vars(options),
                     inputs={"drafter": sha256, "target": header["target_sha256"]})
    table = write_profile(directory, measured, header=header, drafter_sha256=sha256, parallel=distributed.world_size(),
                          max_batch_tokens=options.max_batch_tokens, extras=extras)
    complete(directory, manifest, [RECORDS_FILE, SPS_FILE], {"cells": len(measured.cells), "partial": measured.partial})
    first, last = table["sample_batch_tokens"][0], table["sample_batch_tokens"][-1]
    log.info("%d cells at %s; %.1f steps/s with %d tokens, %.1f with %d", len(measured.cells), table["hardware"],
             table["sample_steps_per_sec"][0], first, table["sample_steps_per_sec"][-1], last)
    fit = table["fit"]
    log.info("additive fit: %s", "not identifiable by this grid" if fit["bias_ms"] is None else
             f"bias {fit['bias_ms']:.2f} ms, worst cell off by {fit['max_rel_residual']:.1%}")
