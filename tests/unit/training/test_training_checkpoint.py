"""Checkpoints: atomic, complete, refused by name, and a resume that cannot be told from an uninterrupted run."""

import errno
import json
import logging
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import SHAPE, TinySource, shared_weights, tiny_config, tiny_drafter, tiny_trainer

from deepspec.errors import InputRefused, UserError
from deepspec.training import checkpoint, saving

TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes", "wait_share", "forward_share", "backward_share",
         "optimizer_share")


class StoppingSource(TinySource):
    """Sends this process a signal when a sample is read for the n-th time."""

    def __init__(self, after: int, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.after, self.number = after, number

    def get(self, indices):
        self.after -= 1
        if self.after == 0:
            os.kill(os.getpid(), self.number)
        return super().get(indices)


def rows(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def files(run_dir: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir)): p.read_bytes() for p in sorted(run_dir.rglob("*")) if p.is_file()}


def train(run_dir, stage=0, source=None, head_multiplier=1.0, **trainer):
    config = tiny_config(run_dir, **trainer)
    config.engine.zero_stage = stage
    config.optimizer.head_lr_multiplier = head_multiplier
    return tiny_trainer(run_dir, config=config, source=source).run()


@pytest.mark.parametrize("stage,precision", [
    (0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"),
])
def test_five_and_five_steps_are_ten(tmp_path, stage, precision, caplog):
    caplog.set_level(logging.INFO)
    whole = train(tmp_path / "whole", stage, precision=precision)
    assert whole.step == 10 and not whole.stopped
    # 12 masks are read once; 2 packs a step: the 22nd read is in step 5
    first = train(tmp_path / "parts", stage, StoppingSource(22), precision=precision)
    assert first.stopped and 3 < first.step < 7
    second = train(tmp_path / "parts", stage, precision=precision)
    assert second.step == 10
    assert "no checkpoint found" in caplog.text and "resuming from" in caplog.text
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        one, two = (load_file(tmp_path / run / "checkpoints/step-10" / name) for run in ("whole", "parts"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_parameter_groups_save_and_resume(tmp_path, stage):
    train(tmp_path / "whole", stage, head_multiplier=5.0)
    assert train(tmp_path / "parts", stage, StoppingSource(22), head_multiplier=5.0).stopped
    assert train(tmp_path / "parts", stage, head_multiplier=5.0).step == 10
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")


def test_epoch_boundary_and_middle_of_a_later_epoch_continue_the_order(tmp_path):
    source = TinySource()
    tiny_trainer(tmp_path / "whole", source=source).run()
    order = source.read[12 if source.read[:12] == sorted(source.read[:12]) else 0:]
    for stop in (3, 5, 6):
        first, second = StoppingSource(10**6), TinySource()
        trainer = tiny_trainer(tmp_path / f"at-{stop}", source=first, save_every=stop)
        original = trainer.save

        def save_and_die(original=original, trainer=trainer, stop=stop):
            original()
            if trainer.step == stop:
                raise KeyboardInterrupt

        trainer.save = save_and_die
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        tiny_trainer(tmp_path / f"at-{stop}", source=second).run()
        assert rows(tmp_path / f"at-{stop}") == rows(tmp_path / "whole")
    assert len(order) >= 40


def test_resume_at_another_zero_stage_and_precision_of_storage(tmp_path):
    train(tmp_path / "a", 0)
    train(tmp_path / "b", 2, StoppingSource(22))
    assert checkpoint.read_state(checkpoint.latest(tmp_path / "b")).zero_stage == 2
    train(tmp_path / "b", 3)
    one, two = (load_file(tmp_path / run / "checkpoints/step-10" / checkpoint.MODEL) for run in "ab")
    assert all(torch.allclose(one[key], two[key], atol=1e-5) for key in one)


def test_layout_and_strict_loading(tmp_path):
    train(tmp_path, max_steps=2)
    found = checkpoint.latest(tmp_path)
    assert found.name == "step-2" and (found.parent / "latest").read_text().strip() == "step-2"
    tensors = load_file(found / checkpoint.MODEL)
    expected = {name: p.shape for name, p in tiny_drafter().named_parameters()}
    assert {name: value.shape for name, value in tensors.items()} == expected
    assert all(value.dtype == torch.float32 for value in tensors.values())
    assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
    assert checkpoint.read_shape(found) == SHAPE
    drafter = checkpoint.load_drafter(found, shared_weights())
    assert not drafter.training
    assert all(torch.equal(p, tensors[name]) for name, p in drafter.named_parameters())
    state = checkpoint.read_state(found)
    assert (state.step, state.adam_step, state.samples, state.world_size) == (2, 2, 8, 1)
    assert len(checkpoint.drafter_sha256(found)) == 64


@pytest.mark.parametrize("change,message", [
    (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
    (lambda t: t.update({"extra.weight": torch.ones(1)}), "extra.weight is unknown"),
    (lambda t: t.update({"fc.weight": torch.ones(2, 2)}), r"fc.weight has shape \(2, 2\), expected \(16, 32\)"),
    (lambda t: t.update({"fc.weight": torch.ones(0)}), r"fc.weight has shape \(0,\)"),
])
def test_wrong_tensors_are_refused(tmp_path, change, message):
    train(tmp_path, max_steps=1)
    path = checkpoint.latest(tmp_path) / checkpoint.MODEL
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(InputRefused, match=message):
        checkpoint.load_drafter(path.parent.parent, shared_weights())


def test_truncated_weights_are_refused(tmp_path):
    train(tmp_path, max_steps=1)
    path = checkpoint.latest(tmp_path) / checkpoint.MODEL
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputRefused, match="cannot be read"):
        checkpoint.load_drafter(path.parent.parent, shared_weights())


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER])
def test_damaged_tensors_are_refused(tmp_path, name):
    """Of the right size and shape, so that they load: nothing but their hash tells."""
    train(tmp_path, max_steps=1)
    path = checkpoint.latest(tmp_path) / name
    content = path.read_bytes()
    path.write_bytes(content[:-4] + bytes(byte ^ 1 for byte in content[-4:]))
    with pytest.raises(InputRefused, match="is damaged.*SHA-256.*there is none"):
        train(tmp_path, max_steps=2)


def test_wrong_resume_is_fatal_and_lists_what_exists(tmp_path):
    train(tmp_path / "run", max_steps=2, save_every=1)
    (tmp_path / "empty").mkdir()
    for resume in ("typo", str(tmp_path / "empty"), str(tmp_path / "run/checkpoints/step-7")):
        with pytest.raises(InputRefused, match="step-1, step-2"):
            train(tmp_path / "run", resume=resume)
    pointer = tmp_path / "run/checkpoints/latest"
    for content in ("step-9\n", ""):
        pointer.write_text(content)
        with pytest.raises(InputRefused, match="step-1, step-2"):
            train(tmp_path / "run")


def test_resume_by_path_and_never(tmp_path, caplog):
    train(tmp_path / "a", source=StoppingSource(22))
    step = checkpoint.read_state(checkpoint.latest(tmp_path / "a")).step
    (tmp_path / "a" / "manifest.json").write_text('{"schema_version": 1, "stages": {}}')  # as the main job leaves it
    for name, path in (("b", checkpoint.latest(tmp_path / "a")), ("c", tmp_path / "a")):
        train(tmp_path / name, resume=str(path))
        assert [row["step"] for row in rows(tmp_path / name)] == list(range(step + 1, 11))
        assert not train(tmp_path / name, resume=str(path)).trained  # the same command again: nothing is thrown away
    train(tmp_path / "a", resume="never", max_steps=2)
    assert [row["step"] for row in rows(tmp_path / "a")] == [1, 2]
    assert checkpoint.complete_tags(tmp_path / "a") == ["step-2"]


def test_another_meaning_is_refused_with_both_values(tmp_path):
    train(tmp_path, source=StoppingSource(22))
    before = files(tmp_path)
    for change, message in (
        (lambda c: setattr(c.run, "seed", 6), "seed: 5 in the checkpoint, 6 now"),
        (lambda c: setattr(c.objective, "tv_weight", 0.5), "objective.tv_weight: 0.9 in the checkpoint, 0.5 now"),
        (lambda c: setattr(c.trainer, "global_batch_size", 2), "trainer.global_batch_size: 4 in the checkpoint, 2 now"),
        (lambda c: setattr(c.optimizer, "lr", 0.5), "optimizer.lr"),
    ):
        config = tiny_config(tmp_path)
        change(config)
        with pytest.raises(InputRefused, match=message):
            tiny_trainer(tmp_path, config=config).run()
    assert files(tmp_path) == before
    config = tiny_config(tmp_path)
    config.trainer.micro_batch_size, config.objective.chunk_megabytes = 1, 64  # how, not what
    assert tiny_trainer(tmp_path, config=config).run().step == 10


def test_finished_run_has_nothing_to_do(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    train(tmp_path, max_steps=3)
    before = files(tmp_path)
    result = train(tmp_path, max_steps=3)
    assert not result.trained and "nothing to do" in caplog.text
    assert files(tmp_path) == before


def test_old_checkpoints_go_after_the_new_one_is_there(tmp_path):
    train(tmp_path, save_every=2, keep_last=2)
    assert checkpoint.complete_tags(tmp_path) == ["step-8", "step-10"]
    train(tmp_path / "one", save_every=3, keep_last=0)
    assert checkpoint.complete_tags(tmp_path / "one") == ["step-10"]


def test_save_failure_is_retried_once_and_leaves_the_previous_one(tmp_path, monkeypatch, caplog):
    failures = []

    def flaky(*arguments, real=saving.save_file, **keywords):
        if failures:
            raise OSError(failures.pop(0), "No space left on device")
        return real(*arguments, **keywords)

    monkeypatch.setattr(saving, "save_file", flaky)
    train(tmp_path, max_steps=2, save_every=1)
    failures += [errno.ENOSPC]
    train(tmp_path, max_steps=3)
    assert checkpoint.latest(tmp_path).name == "step-3" and "trying once more" in caplog.text
    failures += [errno.ENOSPC] * 2
    with pytest.raises(UserError, match="previous checkpoint is intact"):
        train(tmp_path, max_steps=4)
    assert checkpoint.latest(tmp_path).name == "step-3"
    assert not list((tmp_path / "checkpoints").glob(".*"))
    assert train(tmp_path, max_steps=4).step == 4


def test_kills_at_any_moment_of_a_save_leave_a_whole_checkpoint(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.run()
    first = checkpoint.latest(tmp_path)
    tensors, state = checkpoint.load_tensors(first), checkpoint.read_state(first)
    generator, seen = random.Random(0), set()
    for _ in range(20):
        start = checkpoint.read_state(checkpoint.latest(tmp_path)).step
        child = os.fork()
        if child == 0:
            try:
                for step in range(start + 1, start + 10**6):
                    saving.save(tmp_path, tensors, SHAPE, replace(state, step=step), {}, keep_last=2)
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.05, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = checkpoint.latest(tmp_path)
        assert checkpoint.load_drafter(found, shared_weights()) is not None
        assert checkpoint.load_tensors(found).keys() == tensors.keys()
        assert (tmp_path / "checkpoints/latest").read_text().strip() == found.name
        saving.remove_partial(tmp_path)
        seen.add(found.name)
    assert len(seen) > 3


def test_partial_checkpoints_are_ignored_and_removed(tmp_path, caplog):
    train(tmp_path, max_steps=2)
    good = tmp_path / "checkpoints/step-2"
    for name in ("step-9", ".step-9.partial"):
        (tmp_path / "checkpoints" / name / "drafter").mkdir(parents=True)
    manifest = json.loads((good / "manifest.json").read_text()) | {"status": "incomplete"}
    (tmp_path / "checkpoints/step-9/manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.latest(tmp_path) == good
    (tmp_path / "checkpoints/latest").unlink()
    assert checkpoint.latest(tmp_path) == good
    train(tmp_path, max_steps=4)
    assert not (tmp_path / "checkpoints/.step-9.partial").exists()


def test_sigusr1_saves_and_goes_on(tmp_path):
    result = train(tmp_path, source=StoppingSource(22, signal.SIGUSR1), keep_last=5)
    tags = checkpoint.complete_tags(tmp_path)
    assert result.step == 10 and len(tags) == 2 and tags[1] == "step-10"
