"""Every command of the documentation is one that the program takes: options compose and are valid, plans print, actions
parse. What is marked to run is run; what was never run says why."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

import pytest

from deepspec.cli.job import chosen_stages, in_group
from deepspec.cli.scripts import SCRIPTS as OWN
from deepspec.config import options as options_page
from deepspec.config.compose import compose_config
from deepspec.config.sweeping import read_command
from deepspec.data.features.__main__ import _parser
from deepspec.planning.plan import make_plan, render
from deepspec.planning.validate import validate
from deepspec.runs.__main__ import _parser as runs_parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md")) + [ROOT / "README.md"]
SCRIPTS = {path.stem: path for folder in ("launch", "data_prep") for path in (ROOT / folder).glob("*.py")}
SCRIPT = r"(launch|data_prep)/\w+\.py"
STORES = "deepspec.data.features"
RUNS = "deepspec.runs"


_FENCE = re.compile(r"(?:^ *<!-- ([^\n]*?) -->\n)?^ *```\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)
_RUN, _NOT_RUN = "run", re.compile(r"not run: \S.{5,}")


class Block(NamedTuple):
    """A fenced block without a language, its lines with continued ones joined, and the comment directly above it."""

    marker: str
    lines: list[str]


def blocks(page: Path) -> Iterator[Block]:
    """All of them on a page."""
    for marker, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        yield Block(marker, [line.strip() for line in text.replace("\\\n", " ").splitlines()])


def commands(page: Path, marker: str | None = None) -> list[str]:
    """Lines that start a program of this project; all of them, or those of blocks with ``marker``."""
    return [line for block in blocks(page) if marker in (None, block.marker) for line in block.lines
            if re.search(rf"\b{SCRIPT}|-m deepspec\.", line)]


def words(line: str) -> list[str]:
    """From the program on; a quotation around the whole command is opened."""
    inner = re.search(r"bash -c '(.*)'$", line)
    return shlex.split(inner.group(1) if inner else line, comments=True)


def check(line: str) -> None:
    """Raises ConfigError or fails for a command that would be refused."""
    found = words(line)
    place = next((index for index, word in enumerate(found) if re.fullmatch(SCRIPT, word)), None)
    if place is None:
        module = found.index("-m") + 1
        assert (ROOT / found[module].replace(".", "/")).exists(), found[module]
        if found[module] == STORES:
            _parser().parse_args(found[module + 1:])
        elif found[module] == RUNS:
            runs_parser().parse_args(found[module + 1:])
        return
    script = SCRIPTS[Path(found[place]).stem]
    assert script == ROOT / found[place], found[place]
    if script.stem == "sweep":
        read_command(found[place + 1:], {}, validate)
        return
    own = OWN[script.stem]
    options = [word for word in found[place + 1:] if word != "-m"]
    if {"--help", "--cfg"} & set(options):
        return
    if own.group is not None:
        options = [in_group(option, own.group) for option in options]
    if not any(option.startswith("+experiment") for option in options):
        options.append("+experiment=tiny")  # those of the run that run.dir names
    config = compose_config(options, script.stem)
    validate(config)
    if own.job is None:
        config.stages = list(chosen_stages(config, own.stages))
        assert render(make_plan(config)).strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_understood(page: Path) -> None:
    for line in commands(page):
        try:
            check(line)
        except SystemExit:
            pytest.fail(f"{page.name}: {line!r} is no action")


def test_the_page_on_data_has_its_commands() -> None:
    """So that the test above cannot pass for want of commands."""
    found = commands(ROOT / "docs" / "data.md")
    named = {name for name in SCRIPTS for line in found if f"/{name}.py" in line}
    assert {"collect_prompts", "generate_responses", "extract_features", "train_drafter"} <= named
    actions = {words(line)[3] for line in found if STORES in line}
    assert actions == {"inspect", "verify", "repair", "import"}


def test_options_that_the_page_names_exist() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"`((?:data|responses|features|target|trainer)\.[a-z_.]+)(?:=[^`]*)?`", text))
    config = json.loads(json.dumps(compose_config(["+experiment=tiny"]), default=vars))
    for key in keys:
        value = config
        for part in key.split("."):
            assert part in value, f"{key} is no option"
            value = value[part]
    assert len(keys) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_markers_mean_something(page: Path) -> None:
    """A slip in a marker would silently take its block out of what is run."""
    for block in blocks(page):
        assert block.marker in ("", _RUN) or _NOT_RUN.fullmatch(block.marker), (page.name, block.marker)
    for reason in re.findall(r"\(not run(.*?)\)", page.read_text(encoding="utf-8")):
        assert reason == "" or reason.startswith(":"), (page.name, reason)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the scripts and a run ``runs/tiny`` in it."""
    spec = importlib.util.spec_from_file_location("make_run", ROOT / "tests/unit/report/make_run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("sandbox")
    for name in ("launch", "data_prep", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    module.make_run(folder / "runs/tiny")
    (folder / "runs/tiny/overrides.json").write_text('["+experiment=tiny"]')
    return folder


MARKED = [(page, line) for page in PAGES for line in commands(page, _RUN)]


@pytest.mark.slow
@pytest.mark.parametrize("page, line", MARKED, ids=[f"{page.name}-{line[:60]}" for page, line in MARKED])
def test_commands_marked_to_run_run(page: Path, line: str, sandbox: Path) -> None:
    found = words(line)
    assert found[0] == "python", line
    done = subprocess.run([sys.executable, *found[1:]], cwd=sandbox, capture_output=True, text=True, timeout=600,
                          check=False, env=os.environ | {"WANDB_MODE": "disabled"})
    assert done.returncode == 0 and done.stdout.strip(), (line, done.stdout[-2000:], done.stderr[-2000:])


def test_enough_is_run() -> None:
    """So that the test above cannot pass for want of commands."""
    assert {page.name for page, _ in MARKED} >= {"quickstart.md", "features.md", "clusters.md", "troubleshooting.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


def test_the_index_has_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\(([\w-]+\.md)\)", index)) == set()


def test_the_page_of_options_is_that_of_the_schema() -> None:
    assert (DOCS / "options.md").read_text(encoding="utf-8") == options_page.page(), f"run: {options_page.COMMAND}"


def test_every_option_stands_on_the_page() -> None:
    from deepspec.config.compose import known_keys

    text = options_page.page()
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    keys = {key for key in known_keys() if key not in sections and not any(
        other.startswith(f"{key}.") for other in known_keys())}
    missing = [key for key in keys if f"| `{key}` |" not in text]
    assert not missing and len(keys) > 200


def test_the_picture_of_scheduling_is_what_the_scheduler_does() -> None:
    spec = importlib.util.spec_from_file_location("scheduling_picture", ROOT / "benchmarks/scheduling_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.picture() == (DOCS / "scheduling.svg").read_text(encoding="utf-8")
    # What docs/scheduling.md says about it.
    assert max(module.gains(1)) == module.gains(1)[7] and max(module.gains(16)) == module.gains(16)[3]
    assert 0.6 < module.gains(64)[7] < 0.7
    assert module.chosen(64, 0.9) == 2.0 and module.chosen(64, 0.6) == 0.0
