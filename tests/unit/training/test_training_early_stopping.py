"""Training ends when held-out acceptance does not rise any more, and resumes as if it had not been interrupted."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from test_training_checkpoint import StoppingSource, rows
from test_training_saving import scripted
from tiny_training import TinySource, tiny_config, tiny_trainer

from deepspec.config.schema import TrainerConfig
from deepspec.errors import InputRefused
from deepspec.training import checkpoint
from deepspec.training.retention import Best, exhausted, stale_after

RISES_TWICE = {1: 1.5, 2: 1.9, 3: 1.8, 4: 1.85, 5: 1.9, 6: 1.7, 7: 2.5}


def run(run_dir, values=None, source=None, *, schedule="cosine", patience=3, **trainer):
    config = tiny_config(run_dir, **({"validate_every": 1, "early_stopping_patience": patience} | trainer))
    config.optimizer.schedule = schedule
    made = tiny_trainer(run_dir, config=config, source=source)
    made.validate = scripted(RISES_TWICE if values is None else values)
    return made.run()


def test_it_ends_after_so_many_validations_without_progress(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    result = run(tmp_path)
    assert (result.step, result.total_steps, result.stopped, result.trained) == (5, 10, False, True)
    assert "training ends at step 5 of 10: the last 3 validations were no better than that of step 2" in caplog.text
    assert checkpoint.best(tmp_path).name == "step-2" and checkpoint.latest(tmp_path).name == "step-5"
    again = run(tmp_path)
    assert (again.step, again.trained) == (5, False) and "nothing to do" in caplog.text


def test_more_patience_goes_on_from_there(tmp_path):
    run(tmp_path)
    assert run(tmp_path, patience=5).step == 10  # the rise at step 7 came in time
    assert checkpoint.best(tmp_path).name == "step-7"


def test_without_patience_it_never_ends_early(tmp_path):
    assert run(tmp_path, patience=None).step == 10


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_an_interrupted_run_ends_at_the_same_step_with_the_same_weights(tmp_path, schedule):
    assert run(tmp_path / "whole", schedule=schedule).step == 5
    stopped = run(tmp_path / "parts", source=StoppingSource(18), schedule=schedule)
    assert stopped.stopped and 2 < stopped.step < 5  # in the middle of the count
    assert checkpoint.read_state(checkpoint.latest(tmp_path / "parts")).stale_validations == stopped.step - 2
    assert run(tmp_path / "parts", schedule=schedule).step == 5
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    one, two = (load_file(tmp_path / name / "checkpoints/step-5" / checkpoint.MODEL) for name in ("whole", "parts"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("schedule", ["linear", "constant", "wsd"])
def test_another_schedule_is_another_run(tmp_path, schedule):
    run(tmp_path, patience=None, max_steps=2)
    with pytest.raises(InputRefused, match=f"optimizer.schedule: 'cosine' in the checkpoint, '{schedule}' now"):
        run(tmp_path, patience=None, schedule=schedule)


def test_a_checkpoint_of_before_there_were_schedules_is_a_cosine(tmp_path):
    run(tmp_path, patience=None, max_steps=2)
    state = checkpoint.latest(tmp_path) / checkpoint.STATE
    text = state.read_text()
    assert '"optimizer.schedule"' in text and '"stale_validations"' in text
    state.write_text(text.replace('"optimizer.schedule"', '"was.schedule"').replace('"stale_validations"', '"was"'))
    with pytest.raises(InputRefused, match="optimizer.schedule: 'cosine' in the checkpoint, 'linear' now"):
        run(tmp_path, patience=None, schedule="linear")


def test_another_runs_count_is_not_inherited(tmp_path):
    run(tmp_path / "a")
    result = run(tmp_path / "b", {6: 1.0, 7: 0.9, 8: 0.9, 9: 0.9}, resume=str(tmp_path / "a"))
    assert result.step == 9


def test_the_first_epoch_of_a_store_being_filled_is_never_cut(tmp_path):
    config = tiny_config(tmp_path, validate_every=1, early_stopping_patience=1)
    config.features.mode = "hybrid"
    made = tiny_trainer(tmp_path, config=config, source=TinySource(20))  # 5 steps an epoch
    made.validate = scripted({step: 1.0 for step in range(1, 11)})
    assert made.run().step == 5


def test_what_progress_is():
    best = Best(3, 2.0)
    assert stale_after(2, None, 1.0, 0.0) == 0
    assert stale_after(2, best, 2.1, 0.0) == 0 and stale_after(2, best, 2.0, 0.0) == 3
    assert stale_after(2, best, 2.1, 0.2) == 3 and stale_after(2, best, float("nan"), 0.0) == 3
    options = TrainerConfig(early_stopping_patience=3)
    assert exhausted(3, options, first_epoch_over=False, fills_store=False)
    assert not exhausted(2, options, first_epoch_over=True, fills_store=False)
    assert not exhausted(9, options, first_epoch_over=False, fills_store=True)
    assert not exhausted(9, TrainerConfig(), first_epoch_over=True, fills_store=False)
