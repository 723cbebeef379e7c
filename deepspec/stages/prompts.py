"""Stage: collect the prompts of a run."""

import logging
from pathlib import Path
from typing import Any, Optional

from deepspec import artifacts, distributed
from deepspec.config import paths
from deepspec.config.schema import Config
from deepspec.data.collect import OUTPUTS, collect
from deepspec.data.decontaminate import BenchmarkFile, BenchmarkIndex, Match, decontamination_files
from deepspec.data.prompt_sources import source_paths
from deepspec.data.prompts import SPLITS, read_prompts
from deepspec.data.redaction import redaction_file
from deepspec.data.rendezvous import wait_for
from deepspec.data.totals import Totals

log = logging.getLogger(__name__)


def source_files(config: Config) -> dict[str, str]:
    """Hashes of the local files that decide the prompts: an edited file is another input."""
    hashes = {}
    for source in config.data.sources:
        root = Path(source.path).expanduser()
        for file in source_paths(source):
            name = file.name if file == root else file.relative_to(root).as_posix()
            hashes[f"{source.name}:{name}"] = artifacts.sha256_file(file)
    for path in config.data.decontaminate:
        hashes[f"decontaminate:{path}"] = artifacts.sha256_file(Path(path).expanduser())
    own = redaction_file(config.data.redaction)
    return hashes | ({"redaction": artifacts.sha256_file(own)} if own else {})


def _free_of(directory: Path, files: list[BenchmarkFile], ngram: int) -> bool:
    """Whether finished prompts are free of the benchmarks: they were collected against them, or hold none of their
    text anyway. So another evaluation makes prompts, and all that follows, anew only if it has to."""
    facts = artifacts.require_complete(directory, "Prompts", "data_prep/collect_prompts.py").facts
    known = set(facts.get("decontaminated", {}).values()) if facts.get("decontaminate_ngram") == ngram else set()
    files = [file for file in files if artifacts.sha256_file(Path(file.path).expanduser()) not in known]
    if not files:
        return True
    index = BenchmarkIndex(files, ngram)
    names = ", ".join(file.name for file in files)
    log.info("prompts: comparing those in %s with %s", directory, names)
    found: Optional[Match] = next(filter(None, (index.match(row.messages) for row in read_prompts(directory))), None)
    if found:
        log.warning("prompts: those in %s hold text of %s (%r); they are collected again without", directory,
                    found.benchmark, found.ngram)
    return found is None


def run(config: Config) -> None:
    """Write ``prompts.jsonl`` unless it is there already. Rank 0 collects; the others wait for the manifest."""
    directory = paths.prompts_dir(config)
    key = paths.prompts_key(config)
    inputs = source_files(config)
    benchmarks = decontamination_files(config)
    fingerprint = artifacts.canonical_hash({"key": key, "files": inputs})
    if distributed.rank() != 0:
        wait_for(lambda: artifacts.is_complete(directory, fingerprint), lambda: f"prompts: waiting for {directory}")
        return
    ngram = config.data.decontaminate_ngram
    if artifacts.is_complete(directory, fingerprint) and _free_of(directory, benchmarks, ngram):
        log.info("prompts: up to date (%s)", directory)
        return
    manifest = artifacts.begin(directory, "prompts", fingerprint, inputs=inputs, config=key, seed=config.run.seed)
    totals = collect(config.data, config.run.seed, directory, benchmarks)
    facts = _facts(totals, ngram)
    artifacts.complete(directory, manifest, OUTPUTS, facts)
    log.info("prompts: %d train, %d held out, in %s\n%s", facts["splits"]["train"], facts["splits"]["held_out"],
             directory, totals.table())


def _facts(totals: Totals, ngram: int) -> dict[str, Any]:
    benchmarks = totals.decontamination["benchmarks"]
    return {
        "sources": {name: {"read": counts.read, "valid": counts.valid, "kept": counts.kept,
                           "refused": dict(sorted(counts.refused.items()))} for name, counts in totals.sources.items()},
        "splits": {split: totals.everything().splits[split] for split in SPLITS},
        "domains": {name: counts.total() for name, counts in sorted(totals.domains.items())},
        "decontaminate_ngram": ngram,
        "decontaminated": {name: facts["sha256"] for name, facts in benchmarks.items()},
    }
