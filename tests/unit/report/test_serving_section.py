"""Simulated serving in the report: figures, advice, and files that lack or garble parts of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspec.report.inputs import read_run_files
from deepspec.report.serving import serving
from tests.unit.report.make_run import make_run, simulation


def section(directory: Path, values: Any) -> str:
    (directory / "simulation.json").write_text(json.dumps(values))
    return serving(read_run_files(directory)).body


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("serving") / "tiny", steps=3)


def test_figures_and_advice(run: Path) -> None:
    body = section(run, simulation())
    assert body.count("<figure>") == 4
    assert "tiny, scheduled" in body and "no speculation" in body and "mode=scheduled" in body
    assert "&lt;b&gt;tokens&lt;/b&gt;" in body and "<b>" not in body
    assert "extrapolated" in body and "2 CPU cores" in body


def test_without_arrivals_there_are_three_figures(run: Path) -> None:
    values = simulation()
    values["points"] = [point for point in values["points"] if point["concurrency"]]
    assert section(run, values).count("<figure>") == 3


@pytest.mark.parametrize("values", [{}, {"points": 3}, {"points": [{"drafter": "x"}, 4]}])
def test_nothing_to_show_names_the_command(run: Path, values: Any) -> None:
    assert "launch/simulate_serving.py" in section(run, values)
