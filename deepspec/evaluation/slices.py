"""Acceptance by what a round had before it: how long its context was, and whether its conversation reasons.

A round is counted where it begins: its context is the prompt and the answer before its anchor, in tokens. P prompts.
"""

from bisect import bisect_right
from dataclasses import replace
from typing import Any, Iterable, Mapping, Optional, Sequence

import numpy as np

from deepspec.decoding.types import DecodeResult
from deepspec.evaluation.analytic import AnchorValues
from deepspec.evaluation.benchmarks import Conversation
from deepspec.evaluation.bootstrap import acceptance_length_interval
from deepspec.evaluation.metrics import AcceptanceCounts, conversation_of, summary

CONTEXT, THINKING = "context_length", "thinking"
_KEYS = ("num_prompts", "rounds", "accepted", "acceptance_length", "accepted_per_position", "conditional_acceptance")
Slices = dict[str, dict[str, AcceptanceCounts]]  # what is told apart: its values, in order


def bucket_names(edges: Sequence[int]) -> list[str]:
    """Names of the ranges that ascending ``edges`` cut context lengths into: below the first, .., from the last on."""
    bounds = [0, *edges]
    return [f"{low}-{high - 1}" for low, high in zip(bounds, bounds[1:])] + [f"{bounds[-1]}+"]


def _by_context(results: Sequence[DecodeResult], length: int, edges: Sequence[int]) -> dict[str, AcceptanceCounts]:
    names = bucket_names(edges)
    parts: dict[str, list[DecodeResult]] = {name: [] for name in names}
    for item in results:
        position, rounds = item.prompt_tokens, {name: [] for name in names}  # type: ignore[var-annotated]
        for record in item.rounds:
            rounds[names[bisect_right(edges, position)]].append(record)
            position += record.accepted + record.bonus
        for name, own in rounds.items():
            if own:
                parts[name].append(replace(item, rounds=tuple(own)))
    return {name: AcceptanceCounts.of(own, length) for name, own in parts.items() if own}


def reasons(conversations: Iterable[Conversation]) -> dict[str, bool]:
    """Whether a conversation is to reason, by its id, where it says so."""
    return {item.id: item.thinking for item in conversations if item.thinking is not None}


def _split(names: Sequence[str], modes: Mapping[str, bool]) -> dict[str, list[int]]:
    """Places of conversations with reasoning on and off. A rank or a benchmark may have one kind only."""
    found = {label: [place for place, name in enumerate(names) if modes.get(name) is value]
             for label, value in (("on", True), ("off", False))}
    return {label: places for label, places in found.items() if places}


def of_results(results: Sequence[DecodeResult], length: int, edges: Sequence[int],
               modes: Mapping[str, bool]) -> Slices:
    """Counted rounds of decoded answers; ``length`` is K, ``modes`` says which conversations reason."""
    places = _split([conversation_of(item.id) for item in results], modes)
    return {CONTEXT: _by_context(results, length, edges),
            THINKING: {label: AcceptanceCounts.of([results[place] for place in own], length)
                       for label, own in places.items()}}


def of_anchors(values: AnchorValues, edges: Sequence[int], modes: Mapping[str, bool]) -> Slices:
    """Expected rounds at anchors. An anchor's position in its text is the length of its context."""
    values = values.select(values.weight > 0)
    bucket = np.searchsorted(np.asarray(edges), values.position, side="right")
    by_context = {name: values.select(bucket == place).counts() for place, name in enumerate(bucket_names(edges))
                  if bool((bucket == place).any())}
    places = _split([conversation_of(name) for name in values.sample.tolist()], modes)
    return {CONTEXT: by_context, THINKING: {label: values.select(np.array(own)).counts()
                                            for label, own in places.items()}}


def together(parts: Iterable[Slices]) -> Slices:
    """Slices of several ranks or benchmarks, pooled."""
    merged: dict[str, dict[str, list[AcceptanceCounts]]] = {}
    for part in parts:
        for kind, values in part.items():
            for name, counts in values.items():
                merged.setdefault(kind, {}).setdefault(name, []).append(counts)
    return {kind: {name: AcceptanceCounts.concatenate(own) for name, own in values.items()}
            for kind, values in merged.items()}


def described(slices: Slices, resamples: int, seed: int) -> dict[str, Any]:
    """``by_context_length`` and ``by_thinking`` of a setting of evaluation.json, where there is something to tell:
    reasoning is told apart only where there are both kinds."""

    def entry(counts: AcceptanceCounts) -> dict[str, Any]:
        values = summary(counts)
        interval: Optional[list[float]] = acceptance_length_interval(counts, resamples, seed)
        return {key: values[key] for key in _KEYS} | {"acceptance_length_ci95": interval}

    def order(name: str) -> tuple[int, str]:
        start = name.rstrip("+").partition("-")[0]
        return (int(start), name) if start.isdigit() else (0, name)

    return {f"by_{kind}": {name: entry(values[name]) for name in sorted(values, key=order)}
            for kind, values in slices.items() if len(values) > (kind == THINKING)}
