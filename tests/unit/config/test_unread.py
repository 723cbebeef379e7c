"""Options that the chosen drafter does not read: refused where somebody typed them, and only there."""

from pathlib import Path

import pytest

from deepspec.artifacts import atomic_write_json
from deepspec.config.compose import compose_config, parse_overrides
from deepspec.config.schema_drafter import ALGORITHMS
from deepspec.config.sweeping import read_command
from deepspec.config.unread import _READERS, refuse_unread
from deepspec.errors import ConfigError
from deepspec.planning.sizes import count_parameters
from deepspec.planning.validate import validate
from deepspec.runs.status import RUNNING, JobStatus
from tests.conftest import script

TINY = "+experiment=tiny"
ANOTHER = {"drafter.num_layers": "3", "drafter.markov_rank": "11", "drafter.confidence_with_markov": "false",
           "drafter.intermediate_size": "40"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("key", _READERS)
def test_the_table_is_what_decides_a_drafter_s_size(key: str, algorithm: str) -> None:
    """An option is refused exactly where another value leaves every parameter as it is."""
    base = [TINY, f"drafter={algorithm}", "export.formats=[deepspec]"]
    before, after = compose_config(base), compose_config([*base, f"{key}={ANOTHER[key]}"])
    same = count_parameters(before) == count_parameters(after)
    assert same == (algorithm not in _READERS[key])
    given = parse_overrides([f"{key}={ANOTHER[key]}"])
    if not same:
        refuse_unread(given, [algorithm])
        return
    with pytest.raises(ConfigError, match=rf"{key}.*drafter.algorithm={algorithm} does not read: it .*\. Leave it out"):
        refuse_unread(given, [algorithm])


@pytest.mark.parametrize("words", [
    ["+sweep=table1", "drafter.markov_rank=16"], ["+sweep=depth"], ["+sweep=rank", "drafter=dflash"],
    ["drafter=dspark,eagle3", "drafter.num_layers=1"], ["drafter=dspark,dflash", "drafter.num_layers=1,2"],
    ["drafter=dspark,dflash,eagle3", "drafter.block_size=4,7"], ["drafter.markov_rank=8,16"],
])
def test_sweeps_over_several_drafters_go_on(words: list[str]) -> None:
    read_command(["-m", TINY, *words], {}, validate)


@pytest.mark.parametrize("words, part", [
    (["drafter=dflash,eagle3", "drafter.markov_rank=16"], "drafter.markov_rank=16 sets"),
    (["drafter=dspark,eagle3", "drafter.num_layers=1,2"], "sweeps drafter.num_layers.*algorithm=eagle3"),
    (["drafter=mtp", "drafter.num_layers=3", "run.seed=1,2"], "algorithm=mtp does not read: it is a single layer"),
])
def test_a_sweep_that_would_repeat_itself_is_refused(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_command(["-m", TINY, *words], {}, validate)


def test_a_command_is_refused_and_a_sweep_s_job_is_not(tmp_path: Path) -> None:
    words = [TINY, "drafter=eagle3", "export.formats=[deepspec]", f"run.dir={tmp_path}", f"run.data_root={tmp_path}",
             "plan=true"]
    refused = script("train_drafter", *words, "drafter.markov_rank=64")
    assert refused.returncode == 2 and "drafter.markov_rank=64 sets drafter.markov_rank, which" in refused.stderr
    assert script("train_drafter", *words).returncode == 0
    JobStatus("job", RUNNING, [], []).save(tmp_path)
    assert script("train_drafter", *words, "drafter.markov_rank=64").returncode == 0


def test_options_that_a_run_was_started_with_are_not_judged_again(tmp_path: Path) -> None:
    stored = [TINY, "drafter=eagle3", "export.formats=[deepspec]", "drafter.num_layers=3"]
    atomic_write_json(tmp_path / "overrides.json", stored)
    assert script("train_drafter", f"run.dir={tmp_path}", "plan=true").returncode == 0


def test_a_sweep_has_no_plan() -> None:
    refused = script("sweep", "-m", TINY, "drafter.block_size=4,8", "plan=true")
    assert refused.returncode == 2 and "plan=true prints the plan of one job, not of a sweep" in refused.stderr
