"""Sections on the run itself: training, speed, throughput profile, stages, configuration, environment."""

import json
import re
from html import escape
from typing import Any, Sequence
from urllib.parse import urlsplit, urlunsplit

from deepspec.config.schema import STAGES
from deepspec.report.inputs import MODES, RunFiles, is_number, speeds
from deepspec.report.page import Section, figure, figures, missing, table
from deepspec.report.svg import Row, Series, Value, line_chart, row_chart

_POINTS = 300  # of a curve; more are averaged in groups
_SECRET = re.compile(
    r"(^|_)(api_?key|password|secret|auth|(?<!seconds_per_)token|access_key|credentials?)$",
    re.IGNORECASE)


def curve(metrics: Sequence[dict[str, Any]], name: str, label: str) -> Series:
    """One field of metrics.jsonl against the step; long runs are averaged in groups of equal size."""
    rows = [(row["step"], row[name]) for row in metrics if is_number(row.get("step")) and is_number(row.get(name))]
    size = -(-len(rows) // _POINTS) or 1
    groups = [rows[start:start + size] for start in range(0, len(rows), size)]
    x = [sum(step for step, _ in group) / len(group) for group in groups]
    y: list[Value] = [sum(value for _, value in group) / len(group) for group in groups]
    return Series(label, x, y, points=len(groups) < 3)


def training(files: RunFiles) -> Section:
    """Loss and acceptance over steps."""
    lead = ("How training went. The loss should fall and level off without jumps; the share of draft tokens the target "
            "would accept should rise at every position, the first one highest.")
    if not files.metrics:
        return Section("training", "Training", lead, missing("There are no training metrics yet.",
                                                             files.command("train")))
    last = files.metrics[-1]
    positions = sorted(int(name.split("@")[1]) for name in last if re.fullmatch(r"acceptance_rate@\d+", name))
    shown = sorted({positions[0], positions[len(positions) // 2], positions[-1]}) if positions else []
    losses = [curve(files.metrics, name, label) for name, label in (
        ("loss", "total"), ("loss_tv", "total variation"), ("loss_confidence", "confidence"))]
    charts = figures(
        figure(line_chart([one for one in losses if one.x], x_label="step", y_label="loss",
                          description="Training loss by step"), "Loss by optimizer step."),
        figure(line_chart([curve(files.metrics, f"acceptance_rate@{k}", f"position {k}") for k in shown],
                          x_label="step", y_label="acceptance rate", y_limits=(0.0, 1.0),
                          description="Acceptance rate by step at the first, middle and last position"),
               "Expected acceptance at the first, middle and last position, teacher forced."),
        figure(line_chart([curve(files.metrics, "acceptance_length_proxy", "proxy")], x_label="step",
                          y_label="tokens per round", description="Expected acceptance length by step"),
               "Acceptance length those rates would give; decoding measures the real one."),
    )
    header = ["step", "samples", "loss", "acceptance length (proxy)", "tokens / s", "skipped steps", "memory (GB)"]
    memory = last.get("peak_memory_bytes") or 0
    names = ("step", "samples", "loss", "acceptance_length_proxy", "tokens_per_second", "skipped_steps")
    row = [*map(last.get, names), memory / 1e9 if memory and is_number(memory) else None]
    return Section("training", "Training", lead, charts + table(header, [row], "At the last logged step."))


def speed(files: RunFiles) -> Section:
    """Tokens per second: none, fixed, scheduled."""
    lead = ("Tokens per second of the target alone (none), with every draft token verified (fixed) and with lengths "
            "chosen by confidence and measured cost (scheduled), on this machine. Longer is better; scheduled should "
            "never fall clearly behind the better of the other two.")
    found = [one for one in speeds(files.evaluation) if any(getattr(one, mode) for mode in MODES)]
    skipped = files.evaluation.get("skipped")
    notes = "".join(f'<p class="missing">{escape(f"{mode} was left out: {why}")}</p>'
                    for mode, why in (skipped.items() if isinstance(skipped, dict) else ()))
    if not found:
        return Section("speed", "Speed", lead, missing("No decoding speed was measured yet.",
                                                       files.command("evaluate")))
    modes = [mode for mode in MODES if any(getattr(one, mode) for one in found)]
    chart = row_chart([Row(one.label, [getattr(one, mode) for mode in modes]) for one in found], modes, bars=True,
                      x_label="tokens per second", description="Tokens per second without and with drafting")
    rows = []
    for one in found:
        speeds_of = [getattr(one, mode) for mode in modes]
        rows.append([one.label, *speeds_of, *(value / one.none if value and one.none else None
                                              for mode, value in zip(modes, speeds_of) if mode != "none")])
    header = ["setting", *modes, *(f"{mode} / none" for mode in modes if mode != "none")]
    return Section("speed", "Speed", lead, figure(chart, "Generated tokens per second of the whole evaluation.")
                   + table(header, rows, "Ratios above 1 are a gain.") + notes)


def profile(files: RunFiles) -> Section:
    """SPS curve and measured cells."""
    lead = ("What one step of the target costs on this hardware when it processes so many tokens at once. Where the "
            "curve is flat, verifying more draft tokens is almost free; where it falls, each one must earn its place. "
            "The schedule is made from this curve.")
    tokens, rates = (files.profile.get(f"sample_{name}") for name in ("batch_tokens", "steps_per_sec"))
    if not tokens or not rates:
        return Section("profile", "Throughput profile", lead, missing("There is no throughput profile yet.",
                                                                      files.command("profile")))
    curve_chart = line_chart([Series("SPS", tokens, rates)], x_label="tokens per step", y_label="steps per second",
                             x_log=True, y_limits=(0.0, 0.0), description="Steps per second by tokens per step")
    groups: dict[int, list[dict[str, Any]]] = {}
    for cell in files.cells:
        if all(is_number(cell.get(name)) for name in ("num_reqs", "verify_tokens", "p50_ms", "p10_ms", "p90_ms")):
            groups.setdefault(cell["num_reqs"], []).append(cell)
    wanted = sorted(groups)[:: max(1, -(-len(groups) // 6))]
    series = []
    for requests in wanted:
        cells = sorted(groups[requests], key=lambda cell: cell["verify_tokens"])
        series.append(Series(f"{requests} request{'s' if requests > 1 else ''}",
                             [cell["num_reqs"] * cell["verify_tokens"] for cell in cells],
                             [cell["p50_ms"] for cell in cells], [cell["p10_ms"] for cell in cells],
                             [cell["p90_ms"] for cell in cells]))
    cell_chart = line_chart(series, x_label="tokens per step", y_label="ms per round", x_log=True, y_limits=(0.0, 0.0),
                            description="Measured round time by tokens per step, one line per number of requests")
    names = [name for name in ("hardware", "engine", "dtype", "kv_len", "max_batch_tokens") if files.profile.get(name)]
    rows = [[name, value if isinstance(value := files.profile[name], str) else json.dumps(value)] for name in names]
    return Section("profile", "Throughput profile", lead, figures(
        figure(curve_chart, "Steps per second by tokens per step, as the scheduler reads it."),
        figure(cell_chart, "Measured rounds: median, and 10th to 90th percentile as bars."),
    ) + table(["measured on", ""], rows))


def stages(files: RunFiles) -> Section:
    """Stages of the run and their wall times."""
    lead = "What has been done for this run and how long each part took. Every stage should say complete."
    done = files.manifest.get("stages")
    done = done if isinstance(done, dict) else {}
    if not done:
        return Section("stages", "Stages", lead, missing("No stage has been recorded yet.", files.command("train")))
    rows = [[name, done[name].get("status"), done[name].get("seconds"), str(done[name].get("fingerprint") or "")[:12]]
            for name in (*STAGES, *sorted(set(done) - set(STAGES)))
            if isinstance(done.get(name), dict) and name != "report"]  # this page is being made by it
    total = sum(row[2] for row in rows if is_number(row[2]))
    return Section("stages", "Stages", lead, table(["stage", "status", "seconds", "fingerprint"], rows,
                                                   f"{total / 60:.1f} minutes in all."))


def redact(value: Any, key: str = "") -> Any:
    """A configuration without secrets: values of keys that name one, and user names and queries in addresses."""
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [redact(item, key) for item in value]
    if _SECRET.search(key) and value:
        return "(hidden)"
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return value


def configuration(files: RunFiles) -> Section:
    """What was asked for."""
    lead = "The options that decide the result; the full configuration is below them."
    config = files.manifest.get("config")
    if not isinstance(config, dict):
        return Section("configuration", "Configuration", lead, missing("No configuration has been recorded yet.",
                                                                       files.command("train")))
    config = redact(config)
    keys = ("target.name", "target.feature_layers", "drafter.algorithm", "drafter.num_layers", "drafter.block_size",
            "drafter.head", "drafter.markov_rank", "objective.ce_weight", "objective.tv_weight",
            "objective.confidence_weight", "objective.decay", "data.max_length", "features.mode", "features.codec",
            "trainer.epochs", "trainer.global_batch_size", "trainer.num_anchors", "trainer.precision", "optimizer.lr",
            "confidence.temperature", "run.seed", "trainer.seed")
    rows = []
    for key in keys:
        value = files.option(*key.split("."))
        if value is not None:
            rows.append([key, str(value)])
    text = escape(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False))
    return Section("configuration", "Configuration", lead, table(["option", "value"], rows)
                   + f"<details><summary>All options</summary><pre>{text}</pre></details>")


def environment(files: RunFiles) -> Section:
    """Versions and files that could not be read."""
    lead = "What the run was made with; needed to make it again."
    packages = files.manifest.get("packages")
    rows = [["code revision", str(files.manifest.get("git_revision") or "unknown")]]
    rows += [[name, str(version)] for name, version in sorted(packages.items())] if isinstance(packages, dict) else []
    problems = "".join(f'<p class="missing">{escape(problem)}</p>' for problem in files.problems)
    return Section("environment", "Environment", lead, problems + table(["part", "version"], rows))
