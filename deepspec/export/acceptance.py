"""Measured acceptance under the field names that vLLM reports, and what schedules need of it. K draft tokens."""

from typing import Any, Mapping, Optional


def histogram(per_position: Any, rounds: Any) -> Optional[list[int]]:
    """Steps that accepted exactly 0, 1, .. K tokens, from counts (or shares of ``rounds``) per position."""
    if not per_position or not rounds or any(value is None for value in per_position):
        return None
    counts = [float(value) for value in per_position]
    if max(counts) <= 1.0 and any(value != int(value) for value in counts):
        counts = [value * rounds for value in counts]
    reached = [float(rounds), *counts, 0.0]
    return [round(reached[k] - reached[k + 1]) for k in range(len(counts) + 1)]


def speculative_settings(evaluation: Optional[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The settings in which this drafter took part: not those of the target alone or of an untrained drafter. Decoded
    ones come first, computed ones (mode analytic) after them."""
    settings = ((evaluation or {}).get("settings") or {}).items()
    return {name: setting for name, setting in sorted(settings, key=lambda item: item[1].get("mode") == "analytic")
            if setting.get("decoding") != "none" and setting.get("drafter") != "untrained"}


def acceptance(evaluation: Mapping[str, Any], draft_length: int) -> dict[str, Any]:
    """Acceptance per setting, domain and benchmark under vLLM field names; pooled, bonus token included."""
    def entry(values: Mapping[str, Any]) -> dict[str, Any]:
        found = {"mean_acceptance_length": values.get("acceptance_length"),
                 "mean_acceptance_length_ci95": values.get("acceptance_length_ci95"),
                 "num_spec_steps": values.get("rounds"), "num_draft_tokens": values.get("drafted"),
                 "num_accepted_draft_tokens": values.get("accepted"), "num_spec_tokens": draft_length,
                 "accepted_per_position": values.get("accepted_per_position"),
                 "conditional_acceptance": values.get("conditional_acceptance")}
        if values.get("drafted"):
            found["draft_acceptance_rate"] = values["accepted"] / values["drafted"]
        counts = values.get("accepted_histogram")
        if counts is None:
            counts = histogram(values.get("accepted_per_position"), values.get("rounds"))
        if counts is not None:
            found["acceptance_histogram"] = counts
        return {key: value for key, value in found.items() if value is not None}

    settings = {
        name: {**{key: setting.get(key) for key in ("temperature", "thinking", "mode", "decoding", "batch_size")},
               "domains": {key: entry(value) for key, value in (setting.get("domains") or {}).items()},
               "benchmarks": {key: entry(value) for key, value in (setting.get("benchmarks") or {}).items()}}
        for name, setting in speculative_settings(evaluation).items()
    }
    return {"schema_version": 1, "settings": settings,
            "convention": "acceptance length = 1 + accepted / steps: the bonus token counts, pooled over all steps"}


def mean_survival(evaluation: Optional[Mapping[str, Any]], draft_length: int) -> Optional[list[float]]:
    """Pooled share of steps that accepted at least 1, .. K tokens, over the first sampled setting of full drafts."""
    for setting in speculative_settings(evaluation).values():
        benchmarks = list((setting.get("benchmarks") or {}).values())
        totals, rounds = [0.0] * draft_length, 0
        for values in benchmarks:
            counts = histogram(values.get("accepted_per_position"), values.get("rounds"))
            if counts is None or len(counts) != draft_length + 1:
                continue
            if values["drafted"] < 0.95 * draft_length * values["rounds"]:
                continue
            rounds += values["rounds"]
            for k in range(draft_length):
                totals[k] += sum(counts[k + 1:])
        if rounds:
            return [total / rounds for total in totals]
    return None
