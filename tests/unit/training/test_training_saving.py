"""Saving in the background, and which checkpoints stay."""

import errno
import json
import threading
from pathlib import Path

import pytest
from test_training_checkpoint import StoppingSource, files
from tiny_training import TinySource, tiny_config, tiny_trainer

from deepspec.errors import InputRefused, UserError
from deepspec.training import checkpoint, saving
from deepspec.training.retention import Best, better, leftovers
from deepspec.training.session import chosen_checkpoint


class Slow:
    """``save_file`` that waits until it is told to go on, and notes the thread it runs in."""

    def __init__(self, monkeypatch) -> None:
        self.go, self.entered, self.threads = threading.Event(), threading.Event(), []
        real = saving.save_file

        def save_file(*arguments, **keywords):
            self.threads.append(threading.current_thread().name)
            self.entered.set()
            assert self.go.wait(20)
            return real(*arguments, **keywords)

        monkeypatch.setattr(saving, "save_file", save_file)


def scripted(values: dict[int, float]):
    """A validation that returns the value given for each step, None at others."""
    return lambda engine, step, *averaged: values.get(step)


def content(run_dir: Path) -> dict[str, bytes]:
    """Files of all checkpoints but their manifests, whose revision and configuration name the run."""
    found = files(run_dir / "checkpoints")
    return {name: data for name, data in found.items() if not name.endswith("manifest.json")}


def test_the_background_writes_the_same_bytes(tmp_path):
    for name, flag in (("sync", False), ("async", True)):
        tiny_trainer(tmp_path / name, save_every=2, keep_last=9, async_save=flag, ema_decay=0.9).run()
    one, two = content(tmp_path / "sync"), content(tmp_path / "async")
    assert len(one) == 5 * 5 + 1 and one == two
    manifests = [[json.loads((tmp_path / run / f"checkpoints/step-{step}/manifest.json").read_text())["files"]
                  for step in range(2, 11, 2)] for run in ("sync", "async")]
    assert manifests[0] == manifests[1]


def test_training_goes_on_while_a_checkpoint_is_written_and_one_is_in_flight_at_most(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    trainer = tiny_trainer(tmp_path, save_every=4)
    seen = []
    original = trainer._row

    def row(result, seconds):
        seen.append((trainer.step, slow.entered.is_set(), checkpoint.complete_tags(tmp_path)))
        if trainer.step == 7:
            assert slow.entered.wait(20)
            slow.go.set()
        return original(result, seconds)

    trainer._row = row
    trainer.run()
    assert [step for step, entered, tags in seen if not tags][:7] == [1, 2, 3, 4, 5, 6, 7]
    assert set(slow.threads) == {"checkpoint"}
    assert all("step-4" in tags for step, _, tags in seen if step > 8)  # the save at 8 waited for the one at 4
    assert checkpoint.complete_tags(tmp_path) == ["step-8", "step-10"]
    assert not [t for t in threading.enumerate() if t.name == "checkpoint"]


def test_what_is_written_is_the_moment_of_the_save(tmp_path, monkeypatch):
    """Ten more steps change every weight in place while the thread waits."""
    slow = Slow(monkeypatch)
    threading.Timer(1.0, slow.go.set).start()
    tiny_trainer(tmp_path / "slow", save_every=2, keep_last=9, ema_decay=0.9).run()
    monkeypatch.undo()
    tiny_trainer(tmp_path / "plain", save_every=2, keep_last=9, ema_decay=0.9, async_save=False).run()
    assert content(tmp_path / "slow") == content(tmp_path / "plain")


def test_a_failed_background_write_ends_the_run_with_one_message(tmp_path, monkeypatch):
    tiny_trainer(tmp_path, max_steps=2).run()
    good = files(tmp_path / "checkpoints")
    tried = []

    def full(*arguments, **keywords):
        tried.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full)
    trainer = tiny_trainer(tmp_path, max_steps=100, save_every=3)
    original = trainer.writer._background.wait
    with pytest.raises(UserError, match="Could not save .*step-3.*No space left.*previous checkpoint is intact"):
        trainer.run()
    assert len(tried) == 2 and 3 <= trainer.step < 100
    assert files(tmp_path / "checkpoints") == good
    original()
    monkeypatch.undo()
    assert tiny_trainer(tmp_path, max_steps=4).run().step == 4


def test_a_bug_in_the_background_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "prune", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_trainer(tmp_path, save_every=3).run()


def test_an_exception_waits_for_the_write_in_flight(tmp_path, monkeypatch):
    slow = Slow(monkeypatch)
    trainer = tiny_trainer(tmp_path, save_every=2, max_steps=9)
    original = trainer._row

    def row(result, seconds):
        if trainer.step == 3:
            threading.Timer(0.3, slow.go.set).start()
            raise KeyboardInterrupt
        return original(result, seconds)

    trainer._row = row
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert checkpoint.latest(tmp_path).name == "step-2" and not list(leftovers(tmp_path))


@pytest.mark.parametrize("flag", [True, False])
def test_sigterm_saves_before_the_run_returns(tmp_path, flag):
    result = tiny_trainer(tmp_path, source=StoppingSource(22), async_save=flag).run()
    assert result.stopped and checkpoint.latest(tmp_path).name == f"step-{result.step}"


def test_what_is_better():
    assert better(None, 1.0) and better(Best(3, 1.0), 1.5)
    assert not better(Best(3, 1.0), 1.0) and not better(None, None) and not better(None, float("nan"))


def run_with(run_dir: Path, values: dict[int, float], **trainer):
    made = tiny_trainer(run_dir, **({"validate_every": 1, "keep_last": 1} | trainer))
    made.validate = scripted(values)
    return made.run()


def pointer(run_dir: Path, name: str = "best") -> str:
    return (run_dir / "checkpoints" / name).read_text()


def test_the_best_stays_and_is_saved_where_no_save_was_due(tmp_path):
    run_with(tmp_path, {2: 1.5, 3: 2.5, 5: 2.0, 9: 2.4}, save_every=4)
    assert pointer(tmp_path) == "step-3\n" and pointer(tmp_path, "latest") == "step-10\n"
    assert checkpoint.complete_tags(tmp_path) == ["step-3", "step-10"]
    state = checkpoint.read_state(checkpoint.latest(tmp_path))
    assert (state.best_step, state.best_acceptance) == (3, 2.5)
    config = tiny_config(tmp_path)
    config.export.checkpoint = "best"
    assert chosen_checkpoint(config) == checkpoint.best(tmp_path) == tmp_path / "checkpoints/step-3"


def test_the_last_step_may_be_the_best(tmp_path):
    run_with(tmp_path, {10: 2.5}, validate_every=0)
    assert pointer(tmp_path) == "step-10\n" and checkpoint.complete_tags(tmp_path) == ["step-10"]


def test_without_a_best_the_way_out_is_named(tmp_path):
    run_with(tmp_path, {3: 2.5}, keep_best=False)
    config = tiny_config(tmp_path)
    config.export.checkpoint = "best"
    with pytest.raises(InputRefused, match="no best checkpoint.*step-10.*export.checkpoint=latest"):
        chosen_checkpoint(config)


def test_the_best_survives_a_resume_and_its_value_counts(tmp_path):
    run_with(tmp_path, {2: 3.0}, max_steps=5)
    run_with(tmp_path, {7: 2.9}, max_steps=8)
    assert pointer(tmp_path) == "step-2\n" and checkpoint.complete_tags(tmp_path) == ["step-2", "step-8"]
    run_with(tmp_path, {9: 3.1}, max_steps=10)
    assert pointer(tmp_path) == "step-9\n" and checkpoint.complete_tags(tmp_path) == ["step-9", "step-10"]


def test_a_resume_from_an_earlier_step_forgets_the_best_of_the_future(tmp_path):
    run_with(tmp_path, {2: 2.0, 6: 9.0}, save_every=4, keep_last=9)
    run_with(tmp_path, {8: 1.9}, resume=str(tmp_path / "checkpoints/step-4"))
    assert pointer(tmp_path) == "step-2\n"
    assert checkpoint.complete_tags(tmp_path) == ["step-2", "step-10"]
    run_with(tmp_path, {1: 0.5}, resume="never", max_steps=2)
    assert pointer(tmp_path) == "step-1\n" and checkpoint.complete_tags(tmp_path) == ["step-1", "step-2"]


def test_a_best_that_is_gone_is_forgotten(tmp_path):
    run_with(tmp_path, {2: 3.0}, max_steps=5)
    saving.discard(tmp_path / "checkpoints/step-2")
    run_with(tmp_path, {7: 1.0}, max_steps=8)
    assert pointer(tmp_path) == "step-7\n"


def test_a_best_of_another_runs_folder_is_not_this_ones(tmp_path):
    run_with(tmp_path / "a", {2: 3.0}, max_steps=5)
    run_with(tmp_path / "b", {7: 0.5}, max_steps=8, resume=str(tmp_path / "a"))
    assert pointer(tmp_path / "b") == "step-7\n"


def test_a_discarded_checkpoint_is_gone_at_once(tmp_path, monkeypatch):
    tiny_trainer(tmp_path, max_steps=1).run()
    monkeypatch.setattr("shutil.rmtree", lambda *arguments, **keywords: None)
    saving.discard(tmp_path / "checkpoints/step-1")
    assert checkpoint.complete_tags(tmp_path) == [] and list(leftovers(tmp_path))
    monkeypatch.undo()
    saving.remove_partial(tmp_path)
    assert not list(leftovers(tmp_path))


def test_a_finished_run_completes_an_interrupted_clean_up(tmp_path):
    run_with(tmp_path, {2: 3.0}, save_every=3)
    before = files(tmp_path)
    for name in ("step-4", ".step-6.deleted"):
        (tmp_path / "checkpoints" / name / "drafter").mkdir(parents=True)
    manifest = (tmp_path / "checkpoints/step-2/manifest.json").read_text()
    (tmp_path / "checkpoints/step-4/manifest.json").write_text(manifest)
    (tmp_path / "checkpoints/.latest.77.tmp").write_text("step-4\n")
    assert not run_with(tmp_path, {}).trained
    assert files(tmp_path) == before


def test_starts_of_a_resumed_process_are_checked_again(tmp_path, monkeypatch):
    """Checks of a start are not tied to step 1: a resumed run loads strictly, compares what it means, primes."""
    tiny_trainer(tmp_path, source=StoppingSource(22)).run()
    calls = []
    for name in ("prime", "require_same"):
        real = getattr(__import__("deepspec.training.trainer", fromlist=[name]), name)
        monkeypatch.setattr(f"deepspec.training.trainer.{name}",
                            lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    tiny_trainer(tmp_path).run()
    assert calls == ["require_same", "prime"]


def test_load_then_save_at_once_is_the_same_checkpoint(tmp_path):
    """Resume, save before any step, resume again: weights, moments and averages do not move, at any stage."""
    for stage in (0, 2, 3):
        run = tmp_path / str(stage)
        tiny_trainer(run, max_steps=3, ema_decay=0.9).run()
        config = tiny_config(run, max_steps=5, ema_decay=0.9)
        config.engine.zero_stage = stage
        trainer = tiny_trainer(run, config=config)
        before = content(run)
        trainer._start(checkpoint.latest(run))
        trainer.saved_at = None
        trainer.save()
        trainer.writer.settle()
        after = content(run)
        different = {name for name in before if before[name] != after[name]}
        assert different <= {"step-3/state.json"}, different


def test_skipping_done_batches_reads_nothing(tmp_path):
    tiny_trainer(tmp_path, source=StoppingSource(22)).run()
    step = checkpoint.read_state(checkpoint.latest(tmp_path)).step
    source = TinySource()
    tiny_trainer(tmp_path, source=source, max_steps=step + 1).run()
    assert len(source.read) <= 8  # four samples of one window, and their loss masks
