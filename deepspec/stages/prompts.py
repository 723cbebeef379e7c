"""Stage: collect the prompts of a run."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from deepspec import artifacts, distributed
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.jsonl import dump_row
from deepspec.data.prompts import PROMPTS_FILE, SPLITS, collect
from deepspec.data.rendezvous import wait_for

log = logging.getLogger(__name__)


def source_files(config: Config) -> dict[str, str]:
    """Hashes of the local files that prompts are read from: an edited file is another input."""
    hashes = {}
    for source in config.data.sources:
        path = Path(source.path).expanduser()
        if source.kind not in ("jsonl", "parquet") or not source.path or not path.exists():
            continue
        files = sorted(path.rglob(f"*.{source.kind}")) if path.is_dir() else [path]
        hashes.update({f"{source.name}:{file.name}": artifacts.sha256_file(file) for file in files})
    return hashes


def run(config: Config) -> None:
    """Write ``prompts.jsonl`` unless it is there already. Rank 0 collects; the others wait for the manifest."""
    directory = paths.prompts_dir(config)
    key = paths.prompts_key(config)
    inputs = source_files(config)
    fingerprint = artifacts.canonical_hash({"key": key, "files": inputs})
    if artifacts.is_complete(directory, fingerprint):
        log.info("prompts: up to date (%s)", directory)
        return
    if distributed.rank() != 0:
        wait_for(lambda: artifacts.is_complete(directory, fingerprint), lambda: f"prompts: waiting for {directory}")
        return
    manifest = artifacts.begin(directory, "prompts", fingerprint, inputs=inputs, config=key, seed=config.run.seed)
    rows, counts = collect(config.data, config.run.seed)
    payload = b"".join(dump_row(row.to_json()) for row in rows)
    artifacts.atomic_write_bytes(directory / PROMPTS_FILE, payload)
    facts: dict[str, Any] = {
        "sources": {name: _plain(vars(count)) for name, count in counts.items()},
        "splits": {split: sum(row.split == split for row in rows) for split in SPLITS},
        "domains": dict(sorted(Counter(row.domain for row in rows).items())),
    }
    artifacts.complete(directory, manifest, [PROMPTS_FILE], facts)
    log.info("prompts: %d train, %d held out, in %s", facts["splits"]["train"], facts["splits"]["held_out"], directory)


def _plain(counts: dict[str, Any]) -> dict[str, Any]:
    return counts | {"refused": dict(sorted(counts["refused"].items()))}
