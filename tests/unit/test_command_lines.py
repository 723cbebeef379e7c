"""Scripts and console commands: one table, help for each, and the launcher's own command."""

import ast
import configparser
import sys
from pathlib import Path

import pytest

from deepspec.cli import job
from deepspec.cli.console import launched
from deepspec.cli.help import help_text
from deepspec.cli.scripts import SCRIPTS, as_commands, console_name, script_name
from deepspec.config.compose import CONF_DIR, compose_checked
from deepspec.config.describe import comments, described, section_class
from deepspec.config.schema import Config, SourceConfig, TargetConfig
from deepspec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TINY = "+experiment=tiny"


def test_the_table_is_what_the_folders_hold() -> None:
    for folder in ("launch", "data_prep"):
        found = {path.stem for path in (ROOT / folder).glob("*.py")}
        assert found == {name for name, script in SCRIPTS.items() if script.folder == folder}
    assert all((CONF_DIR / f"{name}.yaml").is_file() for name in SCRIPTS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_runs_its_own_entry(name: str) -> None:
    tree = ast.parse((ROOT / SCRIPTS[name].folder / f"{name}.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert [[ast.literal_eval(argument) for argument in call.args] for call in calls] == (
        [[]] if name == "sweep" else [[name]])


def test_every_script_is_a_console_command() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options.entry_points"]["console_scripts"].split("\n")
    declared = {line.partition(" = ")[0] for line in lines if line.endswith("deepspec.cli.console:main")}
    assert declared == {console_name(name) for name in SCRIPTS}
    assert {script_name(command) for command in declared} == set(SCRIPTS)
    assert script_name("deepspec-nothing") is None


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_help_shows_every_option_of_its_groups_with_this_commands_values(name: str) -> None:
    text = help_text(name, compose_checked([TINY, "run.seed=41"], name))
    script = SCRIPTS[name]
    assert text.startswith(script.summary) and script.example in text
    for section in script.sections:
        for option in described(section_class(section), section):
            assert f"  {option.key}=" in text
    assert "run.seed=41\n" in text and "run.threads=0 " in text
    assert max(len(line) for line in text.splitlines()) <= 140


def test_help_says_what_the_schema_says() -> None:
    assert comments(SourceConfig)["cap"] == "at most so many prompts"
    assert comments(SourceConfig)["kind"].startswith("embedded | jsonl")  # from the line before it
    assert set(comments(TargetConfig)) == set(TargetConfig.__dataclass_fields__)
    sections = {name for script in SCRIPTS.values() for name in script.sections}
    groups = {name for name, value in vars(Config()).items() if hasattr(value, "__dataclass_fields__")}
    assert groups == sections, "an option that no help shows"


def test_the_launcher_runs_the_module_with_its_own_options_first() -> None:
    command = launched("train_drafter", ["--num_gpus", "4", "--", TINY], {})
    assert command is not None and command[0] == sys.executable
    assert command[3:] == ["--num_gpus", "4", "--module", "deepspec.cli", "train_drafter", TINY]
    assert launched("extract_features", [TINY], {}) is not None


@pytest.mark.parametrize("name, arguments, environ", [
    ("calibrate", [TINY], {}), ("train_drafter", [TINY, "plan=true"], {}), ("train_drafter", ["--help"], {}),
    ("train_drafter", ["--cfg", "job"], {}), ("train_drafter", [TINY], {"RANK": "1"}),
])
def test_what_needs_no_launcher_runs_here(name: str, arguments: list[str], environ: dict[str, str]) -> None:
    assert launched(name, arguments, environ) is None


def test_launcher_options_without_a_launcher_are_refused() -> None:
    with pytest.raises(ConfigError, match="before --"):
        launched("calibrate", ["--num_gpus", "2", "--", TINY], {})


@pytest.mark.parametrize("text, expected", [
    ("Make it with: python launch/fit_confidence.py run.dir=x", "Make it with: deepspec-fit-confidence run.dir=x"),
    ("deepspeed launch/train_drafter.py ...", "deepspec-train ..."),
    ("with data_prep/collect_prompts.py and", "with deepspec-collect-prompts and"),
    ("python launch/nothing.py", "python launch/nothing.py"),
])
def test_messages_of_an_installation_name_its_commands(text: str, expected: str) -> None:
    assert as_commands(text) == expected


def test_a_rank_that_lost_another_says_so_in_one_paragraph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(job.os, "_exit", leave)
    monkeypatch.setenv("RANK", "1")
    config = Config()
    config.run.dir = str(tmp_path)
    gloo = RuntimeError("[../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:41234")
    monkeypatch.setenv("WORLD_SIZE", "1")
    job._lost(gloo, config)  # alone there is nobody to lose
    monkeypatch.setenv("WORLD_SIZE", "2")
    job._lost(ValueError("Connection closed by peer"), config)
    assert not codes
    with pytest.raises(SystemExit):
        try:
            raise gloo
        except RuntimeError as error:
            job._lost(error, config)
    said = capsys.readouterr().err
    assert codes == [1] and said.startswith("\n[rank 1] UserError: Another rank has ended")
    assert "gloo" not in said and "gloo" in (tmp_path / "lost-rank-1.txt").read_text()
