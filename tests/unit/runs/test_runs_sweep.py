"""Sweeps: names, the check of the whole command, statuses that survive, objectives, table and page."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from deepspec.config import sweeping
from deepspec.config.compose import CONF_DIR, compose_config, options
from deepspec.config.schema_sweep import SweepConfig
from deepspec.config.sweeping import job_overrides, read_command
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning.validate import validate
from deepspec.runs import sweep
from deepspec.runs.child import Child, command, last_lines
from deepspec.runs.names import job_name, swept
from deepspec.runs.objective import read_objective
from deepspec.runs.status import COMPLETE, FAILED, SKIPPED, STATUS, STOPPED, JobStatus, read_status, read_sweep
from tests.conftest import script

TINY = "+experiment=tiny"


@pytest.mark.parametrize("overrides, name", [
    (["drafter.block_size=4", "run.seed=1"], "block_size-4_seed-1"),
    (["data.max_length=64", "responses.max_tokens=8"], "max_length-64_max_tokens-8"),
    (["responses.batch_size=4", "evaluate.batch_size=8"], "responses-batch_size-4_evaluate-batch_size-8"),
    (["drafter=dflash"], "drafter-dflash"), (["optimizer.lr=0.0003"], "lr-0.0003"), ([], "job"),
])
def test_a_job_is_named_by_what_differs(overrides: list[str], name: str) -> None:
    assert job_name(overrides) == name


def test_names_need_no_quoting_and_do_not_collide() -> None:
    values = ["a=b,c", "a-b-c", "李明", "x y", "[1,2]", "[1,3]", "l" * 200, "l" * 201]
    names = [job_name([f"target.path={value}"]) for value in values]
    assert len(set(names)) == len(values)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-") for name in names)
    assert max(map(len, names)) <= 90


def test_what_hydra_writes_another_way_is_common_all_the_same() -> None:
    given = read_command([TINY, "drafter.block_size=4,8", "evaluate.baseline_untrained=false", "evaluate.modes=[none]"],
                         {}, validate)
    job = [TINY, "evaluate.baseline_untrained=False", "evaluate.modes=[none]", "drafter.block_size=4"]
    assert swept(job, given.recognised) == ("drafter.block_size=4",)


def test_common_overrides_are_left_out_of_the_name() -> None:
    assert swept([TINY, "run.seed=1"], [TINY]) == ("run.seed=1",)


def test_a_command_is_read() -> None:
    words = ["-m", TINY, "drafter.block_size=3,4", "run.name=b", "sweep.stop_on_failure=true"]
    given = read_command(words, {}, validate)
    assert given.overrides == [TINY, "drafter.block_size=3,4", "run.name=b", "sweep.stop_on_failure=true"]
    assert given.common == [TINY, "run.name=b", "sweep.stop_on_failure=true"]
    assert given.config.drafter.block_size == 3 and given.config.sweep.stop_on_failure
    assert job_overrides([TINY, "+sweep=rank", "drafter.block_size=3", "run.name=b", "sweep.launcher=[none]"]) == [
        TINY, "drafter.block_size=3"]


def test_what_a_sweeps_file_sets_reaches_its_jobs_and_given_values_win() -> None:
    jobs = job_overrides([TINY, "+sweep=block_size", "drafter.block_size=16"])
    assert compose_config(jobs).profile.verify_lengths == [0, 1, 3, 16]
    assert compose_config([TINY]).profile.verify_lengths != [0, 1, 3, 16]
    given = job_overrides([TINY, "profile.verify_lengths=[0,2]", "+sweep=block_size"])
    assert compose_config(given).profile.verify_lengths == [0, 2]


def test_what_a_sweeps_file_sets_is_written_as_hydra_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "own.yaml").write_text(
        "data: {sources: [{name: own, kind: jsonl, path: 'caf\u00e9, x.jsonl'}]}\nrun: {name: n, seed: 3}\n"
        "sweep: {objective: validation}\ntrainer: {stop_at: null}\n")
    monkeypatch.setattr(sweeping, "CONF_DIR", tmp_path)
    monkeypatch.setattr(sweeping, "options", lambda group: ["own"])
    assert job_overrides(["+sweep=own"]) == [
        'data.sources=[{name: "own", kind: "jsonl", path: "caf\u00e9, x.jsonl"}]', "run.seed=3", "trainer.stop_at=null"]
    assert compose_config([TINY, job_overrides(["+sweep=own"])[0]]).data.sources[0].path == "caf\u00e9, x.jsonl"
    assert job_overrides(["+sweep=null"]) == []


@pytest.mark.parametrize("words, environ, part", [
    ([TINY, "drafter.block_size=3,4"], {"RANK": "0"}, "launcher of its own"),
    ([TINY, "drafter.block_size=3,4", "run.dir=x"], {}, "run.name=NAME"),
    ([TINY], {}, "+sweep=depth"),
    ([TINY, "drafter.block_size=4,1"], {}, "drafter.block_size=1"),
    ([TINY, "drafter.blok_size=4,8"], {}, "drafter.block_size"),
    ([TINY, "drafter=dspark,dflush"], {}, "dflush"),
    ([TINY, "run.seed=1,2", "sweep.objective=loss"], {}, "acceptance_length"),
    ([TINY, "run.seed=1,2", "stages=[train]"], {}, "sweep.objective=validation"),
])
def test_a_wrong_sweep_is_refused_before_its_first_job(words: list[str], environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace("+", r"\+").replace("[", r"\[")):
        read_command(["-m", *words], environ, validate)


def test_other_scripts_refuse_what_is_a_sweep_s() -> None:
    result = script("train_drafter", TINY, "+sweep=depth")
    assert result.returncode == 2 and "launch/sweep.py" in result.stderr


@pytest.mark.parametrize("name", sorted(set(options("sweep")) - {"optuna"}))  # has no values of its own
def test_every_value_of_the_sweeps_there_are_is_a_valid_job(name: str) -> None:
    chosen = yaml.safe_load((CONF_DIR / "sweep" / f"{name}.yaml").read_text(encoding="utf-8"))
    swept = chosen["hydra"]["sweeper"]["params"]
    assert swept
    for key, values in swept.items():
        for value in str(values).split(","):
            validate(compose_config([TINY, f"+sweep={name}", f"{key}={value}"], "sweep"))


def test_a_search_with_optuna_composes() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="pip install 'deepspec[sweep]' for searches")
    given = read_command([TINY, "+sweep=optuna", "optimizer.lr=tag(log,interval(1e-4,1e-2))"], {}, validate)
    assert given.common == [TINY, "+sweep=optuna"] and given.config.optimizer.lr == 1e-4


def evaluation(length: float) -> dict:
    return {"settings": {"t1-b8-fixed": {"decoding": "fixed", "temperature": 1.0, "batch_size": 8, "macro": {
        "acceptance_length": length, "acceptance_length_ci95": [length - 0.1, length + 0.1], "speedup": length / 2},
        "domains": {"chat": {"acceptance_length": length}}}}}


def test_objectives(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation(2.0)))
    assert read_objective(tmp_path, "acceptance_length") == (2.0, (1.9, 2.1))
    assert read_objective(tmp_path, "speedup") == (1.0, None)
    with pytest.raises(InputRefused, match="no validation"):
        read_objective(tmp_path, "validation")
    rows = [{"acceptance_length_proxy": 1.5}, {"acceptance_length_proxy": 1.4, "ema": {"acceptance_length_proxy": 1.6}}]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    assert read_objective(tmp_path, "validation").value == 1.6
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(InputRefused, match="sweep.objective=validation"):
        read_objective(tmp_path, "acceptance_length")


FAKE = """
import json, pathlib, sys
values = dict(word.lstrip("+").partition("=")[::2] for word in sys.argv[1:])
run = pathlib.Path(values["run.dir"])
print("block size", values["drafter.block_size"])
(run / "runs.txt").open("a").write("x")
if values["drafter.block_size"] == "5" and not (run / "mended").is_file():
    raise SystemExit("this block size is broken")
length = float(values["drafter.block_size"]) / 2
(run / "manifest.json").write_text(json.dumps({"name": values["run.name"]}))
(run / "evaluation.json").write_text(json.dumps(%s))
"""


@pytest.fixture
def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs that are real processes of a small script in place of the main job."""
    script = tmp_path / "job.py"
    text = json.dumps(evaluation(99.0)).replace("98.9", "length").replace("99.1", "length").replace("99.0", "length")
    script.write_text(FAKE % text.replace("49.5", "length / 2"))
    monkeypatch.setattr(sweep, "command", lambda overrides, launcher: [sys.executable, str(script), *overrides])
    return tmp_path / "sweeps" / "blocks"


def start(directory: Path, size: int, **options: bool) -> JobStatus:
    overrides = [TINY, f"drafter.block_size={size}"]
    return sweep.run_job(directory, overrides, overrides[1:], SweepConfig(**options), "blocks")


def test_a_sweep_with_a_failure_and_its_continuation(fake_job: Path) -> None:
    statuses = [start(fake_job, size) for size in (4, 5, 8)]
    assert [one.status for one in statuses] == [COMPLETE, FAILED, COMPLETE]
    assert statuses[1].exit_code == 1 and statuses[1].error[-1] == "this block size is broken"
    assert read_status(fake_job / "block_size-5") == statuses[1]
    assert [job.name for job in read_sweep(fake_job)] == ["block_size-8", "block_size-4", "block_size-5"]
    assert sweep.finish(fake_job, "acceptance_length") == 1
    assert start(fake_job, 9, stop_on_failure=True).status == SKIPPED

    (fake_job / "block_size-5" / "mended").touch()
    assert [start(fake_job, size).status for size in (4, 5, 8, 9)] == [COMPLETE] * 4
    started = [(fake_job / f"block_size-{size}" / "runs.txt").read_text() for size in (4, 5, 8, 9)]
    assert started == ["x", "xx", "x", "x"]
    assert sweep.finish(fake_job, "acceptance_length") == 0
    page = (fake_job / "report.html").read_text()
    assert "drafter.block_size" in page and "block_size-8" in page and "Comparison of runs" in page


def test_the_table_has_the_best_job_first(fake_job: Path) -> None:
    for size in (4, 8):
        start(fake_job, size)
    lines = sweep.table(read_sweep(fake_job), "acceptance_length").splitlines()
    assert lines[1].split()[:4] == ["block_size-8", "complete", "4.0000", "4.000-4.000"]
    assert lines[2].split()[0] == "block_size-4"


def test_a_status_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text('{"name": 1}')
    with pytest.raises(InputRefused, match="Delete it"):
        read_status(tmp_path)


def test_a_job_asked_to_stop_saves_and_the_sweep_knows(tmp_path: Path) -> None:
    script = ("import signal, sys, time\n"
              "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
              "print('ready', flush=True)\ntime.sleep(60)\n")
    log = tmp_path / "job.log"

    def ask() -> None:
        while not log.is_file() or "ready" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    with Child() as child:
        code = child.run([sys.executable, "-c", script], log)
    asking.join()
    assert code == 0 and child.stopped and last_lines(log) == ["ready", "saved"]
    assert sweep._result(JobStatus("a", "running", [], []), tmp_path, code, child.stopped, "speedup", 1.0
                         ).status == STOPPED


def test_a_job_ends_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's signal at a parent's death is Linux's")
    job = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    outer = ("import sys; from pathlib import Path; from deepspec.runs.child import Child\n"
             f"with Child() as child: child.run([sys.executable, '-c', {job!r}], Path({str(tmp_path / 'job.log')!r}))")
    process = subprocess.Popen([sys.executable, "-c", outer])
    log = tmp_path / "job.log"
    while not log.is_file() or not log.read_text().strip():
        time.sleep(0.05)
    pid = int(log.read_text())
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").is_file() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, "the job lives on"
        time.sleep(0.05)


def test_jobs_have_ports_and_ranks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (command([TINY], []) for _ in range(2))
    assert first[:2] == [sys.executable, "-m"] and first[-4:] == ["--module", "deepspec.cli", "train_drafter", TINY]
    assert first[3].startswith("--master_port=") and first[3] != second[3]
    assert command([TINY], ["--master_port=1", "--num_gpus", "2"])[3:6] == ["--master_port=1", "--num_gpus", "2"]
    assert command([TINY], ["none"])[0] == sys.executable


def test_what_several_ranks_say_is_shown_once(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step\nstep\n\nInputRefused: no prompts\n[rank 1] InputRefused: no prompts\n"
                   "[rank 1] ConfigError: another\n")
    assert last_lines(log) == ["step", "step", "InputRefused: no prompts", "[rank 1] ConfigError: another"]
