"""Stage: how long rounds of this target and drafter take on this machine."""

import logging
import sys

from tqdm import tqdm

from deepspec import distributed
from deepspec.artifacts import begin, canonical_hash, complete
from deepspec.config.paths import run_dir
from deepspec.config.schema import Config
from deepspec.profiling.extras import measure_extras
from deepspec.profiling.files import RECORDS_FILE, SPS_FILE, conditions, write_profile
from deepspec.profiling.measure import grid, measure
from deepspec.profiling.runner import DecoderRunner
from deepspec.training.session import load_run

log = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Measure the grid on rank 0 (other ranks idle, so that nothing disturbs it) and write ``profile/``."""
    if distributed.rank() != 0:
        return
    session = load_run(config)
    options = config.profile
    shapes = grid(options, session.drafter.shape.draft_length)
    directory = run_dir(config) / "profile"
    header = conditions(session.target)
    decided = canonical_hash(header | {"drafter": session.drafter_sha256, "grid": [vars(shape) for shape in shapes]})
    manifest = begin(directory, "profile", decided, seed=config.run.seed, config=vars(options),
                     inputs={"drafter": session.drafter_sha256, "target": session.target.fingerprint})
    runner = DecoderRunner(session.target, session.drafter, config.run.seed)
    total = len(shapes) * options.samples_per_cell
    with tqdm(total=total, desc="profile", unit="round", disable=not sys.stderr.isatty()) as bar:
        measured = measure(runner, shapes, options, seed=config.run.seed, progress=bar.update)
    table = write_profile(directory, measured, header=header, drafter_sha256=session.drafter_sha256,
                          parallel=distributed.world_size(), max_batch_tokens=options.max_batch_tokens,
                          extras=measure_extras(runner, options, seed=config.run.seed))
    complete(directory, manifest, [RECORDS_FILE, SPS_FILE], {"cells": len(measured.cells), "partial": measured.partial})
    first, last = table["sample_batch_tokens"][0], table["sample_batch_tokens"][-1]
    log.info("%d cells at %s; %.1f steps/s with %d tokens, %.1f with %d", len(measured.cells), table["hardware"],
             table["sample_steps_per_sec"][0], first, table["sample_steps_per_sec"][-1], last)
