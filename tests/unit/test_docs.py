"""Every command of the documentation is one that the program takes: options compose and are valid, actions parse."""

import json
import re
import shlex
from pathlib import Path

import pytest

from deepspec.config.compose import CONF_DIR, compose_config
from deepspec.config.sweeping import read_command
from deepspec.data.features.__main__ import _parser
from deepspec.planning.validate import validate
from deepspec.runs.__main__ import _parser as runs_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md")) + [ROOT / "README.md"]
SCRIPTS = {path.stem: path for folder in ("launch", "data_prep") for path in (ROOT / folder).glob("*.py")}
SCRIPT = r"(launch|data_prep)/\w+\.py"
STORES = "deepspec.data.features"
RUNS = "deepspec.runs"


def commands(page: Path) -> list[str]:
    """Lines of the fenced blocks without a language, continued lines joined, comments and variables' values left."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.search(rf"\b{SCRIPT}|-m deepspec\.", line)]


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
    options = [word for word in found[place + 1:] if word != "-m"]
    name = script.stem if (CONF_DIR / f"{script.stem}.yaml").exists() else "train_drafter"
    if not any(option.startswith("+experiment") for option in options):
        options.append("+experiment=tiny")  # those of the run that run.dir names
    validate(compose_config(options, name))


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
