"""A sweep's numbers and figures: four drafters, three seeds, known acceptance, known latencies."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec.evaluation.metrics import AcceptanceCounts
from deepspec.evaluation.values import SettingValues
from deepspec.report.inputs import RunFiles
from deepspec.report.repeats import compare_groups, grouped, opponents
from deepspec.report.sweep_sections import comparison_lines, sweep_sections

LENGTHS = {"dspark": 3.0, "dflash": 2.5, "eagle3": 2.8}
DRAFT_MS = {"dspark": 2.0, "dflash": 2.0, "eagle3": 7.0}
VERIFY_MS, ALONE_MS = 8.0, 6.0
EASE = {"math": 1.2, "chat": 0.8}
K = 3


def counts(length: float, domain: str, prompts: int = 30) -> AcceptanceCounts:
    random = np.random.default_rng(len(domain))  # the same prompts for every drafter
    ease = random.uniform(0.9, 1.1, prompts)
    rounds = np.full(prompts, 50.0)
    accepted = rounds * (length * EASE[domain] * ease / ease.mean() - 1.0)
    steps = np.tile(accepted[:, None] / K, (1, K))
    return AcceptanceCounts(rounds, rounds * K, rounds * K, accepted, rounds, np.tile(rounds[:, None], (1, K)), steps,
                            accepted + rounds, np.array([f"{domain}/{i}" for i in range(prompts)]))


def run_files(name: str, algorithm: str, length: float, draft_ms: float) -> RunFiles:
    kind: dict[str, Any] = {"temperature": 1.0, "thinking": None, "decoding": "fixed", "mode": "sampled",
                            "estimator": "sampled", "batch_size": 8, "domains": {}, "macro": {}}
    kind["benchmarks"] = {f"held_out-{domain}": {"domain": domain} for domain in EASE}
    cells = [{"num_reqs": 1, "verify_tokens": tokens, "draft_ms": draft_ms, "verify_ms": verify, "host_ms": 0.0}
             for tokens, verify in ((1, ALONE_MS), (K + 1, VERIFY_MS))]
    return RunFiles(
        Path(name), name, {"config": {"drafter": {"algorithm": algorithm}}}, (), None, None, {}, {}, tuple(cells),
        {"settings": {"t1": kind}, "draft_length": K}, (),
        values={"t1": SettingValues({f"held_out-{domain}": counts(length, domain) for domain in EASE})})


def jobs(extra: tuple[dict[str, str], ...] = ({},), spread: float = 0.1) -> list[tuple[dict[str, str], RunFiles]]:
    return [({"drafter": name, "trainer.seed": str(seed)} | options,
             run_files(f"{name}-{seed}", name, size + spread * (seed - 1), DRAFT_MS[name]))
            for name, size in LENGTHS.items() for seed in range(3) for options in extra]


def test_table_one() -> None:
    groups = grouped(jobs())
    assert [group.label for group in groups] == ["dflash", "dspark", "eagle3"] and len(groups[0].runs) == 3
    (found,) = compare_groups(groups)
    rows = {row.label: row for row in found.rows}
    assert rows["dspark"].macro.value == pytest.approx(3.0)
    assert rows["dspark"].domains["math"].value == pytest.approx(3.6)
    assert rows["dspark"].macro.trainings == 3
    assert rows["dspark"].macro.training_error == pytest.approx(0.1 / 3 ** 0.5)
    # Eq. 1: tau / (T_draft + T_verify) tokens per millisecond, against 1 token in ALONE_MS.
    assert rows["eagle3"].speedup.value == pytest.approx(2.8 / (7.0 + VERIFY_MS) * ALONE_MS)
    gains = {one.second: one for one in found.contrasts}
    assert set(gains) == {"dflash", "eagle3"} and all(one.first == "dspark" for one in found.contrasts)
    assert gains["dflash"].macro.value == pytest.approx(0.2) and gains["dflash"].speed.value == pytest.approx(0.2)
    assert gains["eagle3"].speed.value == pytest.approx((3.0 / 10.0) / (2.8 / 15.0) - 1.0)
    assert gains["dflash"].macro.prompt_error < 1e-9, "prompts that are as easy for both cancel"
    low, high = gains["dflash"].macro.interval
    assert low < 0.2 < high
    json.dumps(found.to_json())


def test_a_machine_that_was_slower_for_some_jobs_changes_no_speed() -> None:
    (even,) = compare_groups(grouped(jobs()))
    found = jobs()
    for place in (1, 3, 8):
        options, files = found[place]
        slower = tuple(cell | {name: 1.4 * cell[name] for name in ("draft_ms", "verify_ms")} for cell in files.cells)
        found[place] = (options, replace(files, cells=slower))
    (drifted,) = compare_groups(grouped(found))
    assert [row.draft_ms for row in drifted.rows] == pytest.approx([row.draft_ms for row in even.rows])
    for one, other in zip(drifted.rows, even.rows):
        assert one.speedup.interval == pytest.approx(other.speedup.interval)


def test_a_training_that_is_there_twice_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    found = jobs()
    options, files = found[0]
    config = {"drafter": {"algorithm": "dspark"}, "trainer": {"seed": 0}}
    again = replace(files, name="again", manifest={"config": config})
    unnamed = {name: value for name, value in options.items() if name != "trainer.seed"}
    groups = grouped([*found, (options, again), (unnamed, again)])
    assert [len(group.runs) for group in groups] == [3, 3, 3] and len(caplog.records) == 2
    assert "dspark-0 and again have the same options and seed" in caplog.text


def test_without_repetition_the_interval_is_of_prompts_alone() -> None:
    (found,) = compare_groups(grouped([job for job in jobs() if job[0]["trainer.seed"] == "1"]))
    assert all(row.macro.training_error is None and row.macro.interval for row in found.rows)


def test_depth_is_also_compared_with_the_deepest_of_the_others() -> None:
    extra = ({"drafter.num_layers": "2"}, {"drafter.num_layers": "10"})
    groups = grouped([job for job in jobs(extra) if job[0]["drafter"] != "eagle3"])
    assert [group.label for group in groups] == [
        "dflash, num_layers 2", "dflash, num_layers 10", "dspark, num_layers 2", "dspark, num_layers 10"]
    assert opponents(groups) == [(2, 0), (2, 1), (3, 1)]
    alone = groups[2:]
    assert opponents(alone) == [(1, 0)], "one drafter: each value with the first"


def test_every_figure_is_there_with_its_axes() -> None:
    groups = grouped(jobs(({"drafter.block_size": "4"}, {"drafter.block_size": "7"})))
    found = compare_groups(groups)
    sections = {one.anchor: one.body for one in sweep_sections(groups, found, None)}
    assert list(sections) == ["drafters", "by-position", "by-drafter-block_size"]
    assert sections["by-position"].count("conditional acceptance</text>") == len(EASE)
    assert "requests in a batch" in sections["by-position"]
    figure = sections["by-drafter-block_size"]
    assert figure.count("tokens per round by block size") == 2 * (len(EASE) + 1)  # a panel per domain, and the mean
    assert "More tokens per round than dflash, by block size" in figure and "gain, %" in figure
    assert "3.00 (" in sections["drafters"] and "+20.0% (" in sections["drafters"]
    lines = "\n".join(comparison_lines(found))
    assert re.search(r"dspark, block_size 4 over dflash, block_size 4 .*\+20\.0%", lines)


def test_options_without_numbers_are_rows_of_a_chart() -> None:
    groups = grouped([({"drafter.head": head, "trainer.seed": str(seed)},
                       run_files(f"{head}-{seed}", "dspark", size + 0.1 * seed, 2.0))
                      for head, size in (("none", 2.0), ("rnn", 2.4)) for seed in range(2)])
    found = compare_groups(groups)
    body = sweep_sections(groups, found, None)[-1].body
    assert ">none</text>" in body and ">rnn</text>" in body
    assert found[0].contrasts[0].macro.value == pytest.approx(2.45 / 2.05 - 1)


def test_jobs_that_were_not_evaluated_have_no_numbers() -> None:
    files = run_files("a", "dspark", 2.0, 1.0)
    empty = RunFiles(Path("b"), "b", {}, (), None, None, {}, {}, (), {}, ())
    groups = grouped([({"drafter": "dspark"}, files), ({"drafter": "dflash"}, empty)])
    assert compare_groups(groups) == [] and sweep_sections(groups, [], None) == []
    assert compare_groups([]) == []
