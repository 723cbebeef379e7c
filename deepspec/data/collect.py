"""Collecting prompts: read, redacted, checked, decontaminated, without duplicates, mixed by weight, split.

Everything is decided by hashes of contents, never by order or count: adding data moves no row across the split (except
rows held out only to reach ``min_held_out``), and a larger ``max_prompts`` keeps every prompt of a smaller one. Texts
wait in files of the folder ``collecting``; memory holds about 400 bytes per row (0.5 GB for 1.3 million; measured by
benchmarks/collect_prompts.py) besides cached pages of those files. The result depends on nothing but options and
inputs; a run that was killed starts over and gives the same bytes.
"""

import contextlib
import logging
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from deepspec.artifacts import atomic_write_json, fsync_directory
from deepspec.config.schema import DataConfig, SourceConfig
from deepspec.data.decontaminate import BenchmarkFile, Decontamination
from deepspec.data.dedup import SHINGLE, Signatures, find_near_duplicates
from deepspec.data.jsonl import dump_row
from deepspec.data.mixture import apportion, held_out
from deepspec.data.ngrams import shingles
from deepspec.data.progress import Progress
from deepspec.data.prompt_pool import PromptPool, near_text
from deepspec.data.prompt_rows import RowRefused, content_id, conversation, from_column
from deepspec.data.prompt_sources import DEFAULT_EMBEDDED, read_source
from deepspec.data.prompts import PROMPTS_FILE, SPLITS, PromptRow
from deepspec.data.redaction import Redact, load_redaction, redacted, require_text
from deepspec.data.totals import SourceCounts, Totals
from deepspec.errors import ConfigError, InputRefused

log = logging.getLogger(__name__)

TOTALS_FILE, DECONTAMINATION_FILE = "totals.json", "decontamination.json"
OUTPUTS = (PROMPTS_FILE, TOTALS_FILE, DECONTAMINATION_FILE)
_WORK = "collecting"
_SHOWN_REFUSALS = 5
_SHOWN_PAIRS = 20


def _check(data: DataConfig) -> None:
    if not data.sources:
        raise ConfigError("data.sources is empty: name at least one source of prompts.")
    names = [source.name for source in data.sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"data.sources has two sources of one name: {', '.join(names)}. Give each its own name.")
    if not 0 <= data.held_out_fraction < 1:
        raise ConfigError(f"data.held_out_fraction={data.held_out_fraction} must be at least 0 and below 1.")
    for source in data.sources:
        if source.weight < 0 or (source.cap is not None and source.cap < 1):
            raise ConfigError(f"Source {source.name!r}: weight={source.weight} must not be negative and "
                              f"cap={source.cap} must be at least 1.")
    if data.max_prompts is not None and data.max_prompts < 1:
        raise ConfigError(f"data.max_prompts={data.max_prompts} must be at least 1, or null for all.")


class _Collector:
    """One collection: reads all sources into a pool, then chooses."""

    def __init__(self, data: DataConfig, seed: int, work: Path, benchmarks: Sequence[BenchmarkFile]) -> None:
        self.data, self.seed = data, seed
        self.redact: Optional[Redact] = load_redaction(data.redaction)
        self.decontamination = Decontamination(benchmarks, data.decontaminate_ngram)
        self.pool = PromptPool(work / "pool.jsonl")
        self.signatures: Optional[Signatures] = None
        if data.near_duplicate_threshold is not None:
            self.signatures = Signatures(work / "signatures", data.near_duplicate_threshold,
                                         data.near_duplicate_num_perm)
        self.counts = {source.name: SourceCounts() for source in data.sources}

    def close(self) -> None:
        """Release the temporary files. Closing flushes what a full disk did not take: they are removed in any case."""
        with contextlib.suppress(OSError):
            self.pool.close()
        if self.signatures is not None:
            with contextlib.suppress(OSError):
                self.signatures.close()

    def read(self) -> None:
        """All valid rows of all sources."""
        for index, source in enumerate(self.data.sources):
            counts = self.counts[source.name]
            limit = source.cap or self.data.max_prompts or DEFAULT_EMBEDDED
            # How many rows a source has is known only at its end.
            with Progress(f"prompts, {source.name}", None) as progress:
                for where, raw in read_source(source, limit=limit, seed=self.seed):
                    counts.read += 1
                    progress.add(0, failed=not self._valid(index, source, raw, where))

    def _valid(self, index: int, source: SourceConfig, raw: dict[str, Any] | RowRefused, where: str) -> bool:
        """Take the row of ``where`` into the pool; a refused one is counted, and the first few are named."""
        counts = self.counts[source.name]
        try:
            if isinstance(raw, RowRefused):
                raise raw
            self._take(index, source, raw, where, counts.read)
        except RowRefused as refusal:
            counts.refused[refusal.reason] += 1
            if counts.refused.total() <= _SHOWN_REFUSALS:
                # Details may quote a row, which redaction has not seen yet.
                log.warning("%s: skipped, %s", where, refusal.reason if self.redact else refusal)
            return False
        return True

    def _take(self, index: int, source: SourceConfig, raw: dict[str, Any], where: str, number: int) -> None:
        messages, tools = conversation(from_column(raw, source.prompt_column) if source.prompt_column else raw)
        given, domain = raw.get("id"), raw.get("domain")
        given = str(given) if isinstance(given, (str, int)) and str(given) else None
        domain = domain if isinstance(domain, str) else source.domain
        if self.redact:
            messages, tools = redacted(messages, self.redact, where), redacted(tools, self.redact, where)
            require_text(messages)
            domain = redacted(domain, self.redact, where)
            if given is not None and redacted(given, self.redact, where) != given:
                given = None  # two redacted ids may be the same; the content has an id of its own
        identity = content_id(messages, tools) if given is None else given
        self.decontamination.check(identity, source.name, messages)
        # Embedded prompts come in an order of their own, whose beginning does not depend on the limit.
        self.pool.add(index, given, domain, messages, tools, place=number if source.kind == "embedded" else None)
        if self.signatures:
            self.signatures.add(shingles(near_text(messages), SHINGLE))

    def unique(self) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """(rows that stay in order of priority, which of them need their source in the id, facts about near
        duplicates)."""
        rows = self.pool.by_priority()
        rows = self._without(rows, self.pool.repeated_contents(rows), "duplicate")
        within, elsewhere = self.pool.repeated_ids(rows)
        prefixed = rows[elsewhere]
        bare = self.pool.has_id(rows[~elsewhere])
        taken = [self._prefixed_id(int(row)) in bare for row in prefixed]
        # An id of another source may look like this one's with the name of its source.
        within[np.flatnonzero(elsewhere)[np.array(taken, dtype=bool)]] = True
        rows = self._without(rows, within, "duplicate id")
        facts: dict[str, Any] = {}
        if self.signatures:
            found = find_near_duplicates(self.signatures, rows, lambda row: self.pool.shingles_of(row, SHINGLE))
            rows = self._without(rows, np.isin(rows, [pair.dropped for pair in found]), "near duplicate")
            pairs = [{"dropped": self.pool.row(pair.dropped)["id"], "kept": self.pool.row(pair.kept)["id"],
                      "similarity": round(pair.similarity, 4)} for pair in found[:_SHOWN_PAIRS]]
            facts = {"threshold": self.signatures.threshold, "num_perm": self.signatures.num_perm,
                     "bands": self.signatures.bands, "rows_per_band": self.signatures.rows, "shingle": SHINGLE,
                     "dropped": len(found), "pairs": pairs}
        return rows, np.isin(rows, prefixed), facts

    def _prefixed_id(self, row: int) -> str:
        (sources,) = self.pool.columns("sources")
        return f"{self.data.sources[sources[row]].name}/{self.pool.row(row)['id']}"

    def _without(self, rows: np.ndarray, dropped: np.ndarray, reason: str) -> np.ndarray:
        (sources,) = self.pool.columns("sources")
        for index, count in zip(*np.unique(sources[rows[dropped]], return_counts=True)):
            self.counts[self.data.sources[index].name].refused[reason] += int(count)
        return rows[~dropped]

    def choose(self, rows: np.ndarray) -> np.ndarray:
        """Rows that caps and the mixture leave: which of ``rows``, [rows] bool."""
        (sources,) = self.pool.columns("sources")
        own = [np.flatnonzero(sources[rows] == index) for index in range(len(self.data.sources))]
        available = [min(len(places), source.cap or len(places)) for places, source in zip(own, self.data.sources)]
        shares = apportion(available, [source.weight for source in self.data.sources], self.data.max_prompts)
        chosen = np.zeros(len(rows), dtype=bool)
        for source, places, enough, share in zip(self.data.sources, own, available, shares):
            chosen[places[:share]] = True
            counts = self.counts[source.name]
            counts.valid, counts.kept = len(places), share
            counts.unused += Counter({"over cap": len(places) - enough, "over share": enough - share})
        if not chosen.any():
            details = "; ".join(f"{name}: {counts}" for name, counts in self.counts.items())
            raise InputRefused(f"No prompt is left ({details}). A prompt needs at least one user turn with text.")
        return chosen

    def write(self, path: Path, rows: np.ndarray, prefixed: np.ndarray) -> dict[str, Counter[str]]:
        """Write the rows with their splits; returns domain -> split -> rows."""
        sources, domains, split = self.pool.columns("sources", "domains", "split")
        out = held_out(split[rows], domains[rows], self.data.held_out_fraction, self.data.min_held_out)
        found: dict[str, Counter[str]] = {}
        with open(path, "wb") as handle:
            for row, named, is_held_out in zip(rows, prefixed, out):
                item, source = self.pool.row(row), self.data.sources[sources[row]].name
                prompt = PromptRow(f"{source}/{item['id']}" if named else item["id"], item["domain"],
                                   SPLITS[int(is_held_out)], source, tuple(item["messages"]), item.get("tools"))
                handle.write(dump_row(prompt.to_json()))
                self.counts[source].splits[prompt.split] += 1
                found.setdefault(prompt.domain, Counter())[prompt.split] += 1
            handle.flush()
            os.fsync(handle.fileno())
        return found


def collect(data: DataConfig, seed: int, folder: os.PathLike | str,
            benchmarks: Sequence[BenchmarkFile] = ()) -> Totals:
    """Write ``prompts.jsonl``, ``totals.json`` and ``decontamination.json`` into ``folder``; no prompt of it
    holds text of ``benchmarks``. Raises ConfigError, and InputRefused also when nothing is kept."""
    _check(data)
    folder = Path(folder)
    work = folder / _WORK
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    collector = _Collector(data, seed, work, benchmarks)
    try:
        collector.read()
        rows, prefixed, near = collector.unique()
        chosen = collector.choose(rows)
        domains = collector.write(work / PROMPTS_FILE, rows[chosen], prefixed[chosen])
        report = collector.decontamination.report()
        totals = Totals(collector.counts, domains, near, report)
        if data.max_prompts is not None and chosen.sum() < data.max_prompts:
            log.warning("data.max_prompts=%d, but the sources have only %d prompts", data.max_prompts, chosen.sum())
        atomic_write_json(folder / TOTALS_FILE, totals.to_json())
        atomic_write_json(folder / DECONTAMINATION_FILE, report)
        os.replace(work / PROMPTS_FILE, folder / PROMPTS_FILE)
        fsync_directory(folder)
        return totals
    finally:
        collector.close()
        shutil.rmtree(work, ignore_errors=True)
