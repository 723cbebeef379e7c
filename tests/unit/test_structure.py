"""The shape of the code: imports go one way, third-party packages stay where they belong, files stay small."""

import ast
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "errors", "artifacts", "config", "distributed", "kernels", "targets", "data", "drafters", "objective",
    "calibration", "scheduling", "decoding", "profiling", "simulation", "evaluation", "tracking", "training", "export",
    "planning", "report", "doctor", "stages", "runs", "cli",
)
ONLY_IN = {
    "hydra": {"config", "cli"}, "omegaconf": {"config", "cli"}, "wandb": {"tracking"},
    "deepspeed": {"distributed", "training"},
}
FILES = sorted((ROOT / "deepspec").rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert all(alias.name != "*" for alias in node.names), f"{path}: star import"
            yield node.module or ""
            if node.module == "deepspec":
                yield from (f"deepspec.{alias.name}" for alias in node.names)


def module(path: Path) -> str:
    return path.relative_to(ROOT / "deepspec").parts[0].removesuffix(".py")


def test_every_module_has_its_place_in_the_order() -> None:
    assert {module(path) for path in FILES} - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_to_the_left(path: Path) -> None:
    own = module(path)
    if own == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "deepspec" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(own), f"{path}: {own} imports {name}"
        if parts[0] in ONLY_IN:
            assert own in ONLY_IN[parts[0]], f"{path}: {parts[0]} belongs to {sorted(ONLY_IN[parts[0]])}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_silent(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert not [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


EQUATIONS = {
    "Sec. 2.1": ("accept_draft", "sample_residual"), "Eq. 1": ("latency_per_token",), "Eq. 3": ("inject_context",),
    "Eq. 4": ("block_log_probs",), "Eq. 5": ("transition_bias",), "Eq. 6": ("step",), "Eq. 8": ("acceptance_rate",),
    "Eq. 9": ("cross_entropy_loss",), "Eq. 10": ("total_variation_loss",), "Eq. 11": ("confidence_loss",),
    "Eq. 12": ("drafter_loss",), "Sec. 3.2.1": ("fit_temperatures",),
    "Sec. 3.2.2": ("survival_probability", "expected_throughput"), "Alg. 1": ("schedule_prefixes",),
    "Sec. 5.2": ("schedule_budget",), "Fig. 2": ("conditional_acceptance",),
}


def first_lines() -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                first = (ast.get_docstring(node) or "").split("\n\n")[0]
                lines.setdefault(node.name, []).append(first.replace("\n", " "))
    return lines


@pytest.mark.parametrize("equation", EQUATIONS)
def test_every_equation_is_found_by_its_number(equation: str) -> None:
    lines = first_lines()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in EQUATIONS[equation]:
        assert name in lines, f"{equation}: there is no {name}"
        assert any(equation in line for line in lines[name]), f"{name}: its first line does not say {equation}"
        assert name in readme, f"README: the equation index lacks {name}"
