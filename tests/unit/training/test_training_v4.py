"""Training of the V4-style drafter: what a step says of the experts, biases that move, and what a resume restores."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_training import V4_SHAPE, TinySource, shared_weights, tiny_config, tiny_trainer

from deepspec.tracking import Tracker
from deepspec.training import checkpoint, session
from deepspec.training.trainer import DrafterTrainer
from deepspec.training.validate import make_validator

BIAS = "layers.0.ffn.gate.bias"


class LearnableSource(TinySource):
    """The target is sure of a token that its features and the token before tell: a fixed successor of each."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed=seed)
        shared = shared_weights()
        for index, row in enumerate(self.rows):
            first = int(row.sample.input_ids[0]) % 8
            ids = (first + torch.arange(len(row.sample.input_ids))) % 8
            last = 3.0 * shared.lm_head[(ids + 1) % 8]
            features = torch.cat((shared.embed[ids], last), dim=-1)
            self.rows[index] = replace(row, sample=replace(row.sample, input_ids=ids), features=features,
                                       last_hidden=last)


def trainer(run_dir: Path, **options: Any) -> DrafterTrainer:
    return tiny_trainer(run_dir, shape=V4_SHAPE, **options)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{step}" / checkpoint.MODEL)


def test_rows_tell_how_the_experts_are_used(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    found = rows(tmp_path)
    names = {f"experts_{name}@{stage}" for name in ("max_load", "effective", "used", "bias_range") for stage in (1, 2)}
    assert names | {"hidden_rms", "loss", "acceptance_length_proxy"} <= found[0].keys()
    for row in found:
        for stage in (1, 2):
            assert 1.0 <= row[f"experts_max_load@{stage}"] <= 3.0  # six experts, two per token
            assert 2.0 - 1e-9 <= row[f"experts_effective@{stage}"] <= 6.0 and 0.0 < row[f"experts_used@{stage}"] <= 1.0
        assert row["hidden_rms"] > 0.0
    assert found[-1]["loss"] < found[0]["loss"]


def test_training_beats_no_training(tmp_path: Path) -> None:
    """Held-out acceptance (analytic) of samples whose next token follows from their features."""
    source, held_out = LearnableSource(24, seed=3), LearnableSource(8, seed=9)
    config = tiny_config(tmp_path, max_steps=40, validate_every=39)
    made = trainer(tmp_path, config=config, source=source)
    made.validate = make_validator(held_out, V4_SHAPE, config.trainer, config.objective, seed=5, run_dir=tmp_path,
                                   tracker=Tracker())
    untrained = tiny_trainer(tmp_path / "untrained", shape=V4_SHAPE, config=tiny_config(
        tmp_path / "untrained", max_steps=1), source=held_out)
    untrained.config.optimizer.lr = 0.0
    before = untrained.run().row["acceptance_length_proxy"]
    made.run()
    after = json.loads((tmp_path / "validation.jsonl").read_text().splitlines()[-1])["acceptance_length_proxy"]
    assert after > before + 0.2, (before, after)


def test_biases_move_by_the_rate_and_are_saved(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    bias = weights(tmp_path, 10)[BIAS]
    assert bias.dtype == torch.float32 and bool((bias != 0).any())
    steps = bias / 1e-3
    assert float((steps - steps.round()).abs().max()) < 1e-3 and float(steps.abs().max()) <= 10.0
    range_of = rows(tmp_path)[-1]["experts_bias_range@1"]
    assert range_of == pytest.approx(float(bias.max() - bias.min()))
    loaded: Any = checkpoint.load_drafter(tmp_path / "checkpoints" / "step-10", shared_weights())
    assert torch.equal(loaded.gates[0].bias, bias)


def test_no_rate_no_move(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config.drafter.v4.router_bias_rate = 0.0
    trainer(tmp_path, config=config).run()
    assert not bool(weights(tmp_path, 10)[BIAS].any())


@pytest.mark.slow
def test_a_resume_is_the_run(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").run()
    config = tiny_config(tmp_path / "parts", max_steps=10, save_every=5, keep_last=9)
    first = trainer(tmp_path / "parts", config=config)
    first._due = lambda every: every == 5 and first.step == 5 or every == 1  # type: ignore[method-assign]
    first.run()
    for name in ("step-10",):
        for path in sorted((tmp_path / "parts/checkpoints" / name).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (tmp_path / "parts/checkpoints" / name).rmdir()
    (tmp_path / "parts/checkpoints/latest").write_text("step-5\n")
    trainer(tmp_path / "parts", config=config).run()
    whole, parts = weights(tmp_path / "whole", 10), weights(tmp_path / "parts", 10)
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """Loads add up over the window, so biases do not depend on how it is cut."""
    for size in (1, 4):
        trainer(tmp_path / str(size), micro_batch_size=size, max_steps=4).run()
    one, four = weights(tmp_path / "1", 4), weights(tmp_path / "4", 4)
    assert torch.equal(one[BIAS], four[BIAS])
    for left, right in zip(rows(tmp_path / "1"), rows(tmp_path / "4"), strict=True):
        for name in (name for name in left if name.startswith(("experts_", "loss", "hidden_rms"))):
            assert left[name] == pytest.approx(right[name], rel=1e-4, abs=1e-6), name


def test_a_skipped_step_moves_nothing(tmp_path: Path) -> None:
    source = TinySource(4, poison={index: float("nan") for index in range(4)})
    config = tiny_config(tmp_path, max_steps=1, max_bad_steps=3)
    trainer(tmp_path, config=config, source=source).run()
    assert not bool(weights(tmp_path, 1)[BIAS].any())


@pytest.mark.slow
def test_averages_carry_the_biases(tmp_path: Path) -> None:
    trainer(tmp_path, ema_decay=0.5).run()
    averages = load_file(tmp_path / "checkpoints" / "step-10" / checkpoint.AVERAGE)
    assert torch.equal(averages[BIAS], weights(tmp_path, 10)[BIAS])


def test_half_precision_keeps_the_biases_exact(tmp_path: Path) -> None:
    trainer(tmp_path, precision="bf16").run()
    steps = weights(tmp_path, 10)[BIAS] / 1e-3
    assert float((steps - steps.round()).abs().max()) < 1e-3 and bool(steps.any())


def test_another_rate_is_another_run(tmp_path: Path) -> None:
    from deepspec.training.identity import run_identity

    config = tiny_config(tmp_path)
    one = run_identity(config, V4_SHAPE, target="t", data="d")
    config.drafter.v4.router_bias_rate = 0.5
    other = run_identity(config, V4_SHAPE, target="t", data="d")
    assert one != other
    plain = run_identity(config, replace(V4_SHAPE, v4=None), target="t", data="d")
    assert "drafter.router_bias_rate" not in plain


def test_later_stages_keep_in_float32_what_is_served_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, max_steps=1)
    made.run()
    shared, fingerprint = shared_weights(), made.identity["target_fingerprint"]
    target = SimpleNamespace(
        embed_weight=shared.embed.bfloat16(), lm_head_weight=shared.lm_head.bfloat16(), tokenizer_size=None,
        fingerprint=fingerprint, dtype=torch.bfloat16, spec=None)
    monkeypatch.setattr(session, "load_target", lambda *_arguments, **_options: target)
    monkeypatch.setattr(session, "shape_from", lambda *_arguments: V4_SHAPE)
    drafter = session.load_run(made.config).drafter
    stored, found = weights(tmp_path, 1), drafter.tensors()
    assert drafter.dtype == torch.bfloat16
    for name in ("layers.0.attn.attn_sink", "layers.0.hc_attn_fn", "markov_head.markov_w2.weight"):
        assert torch.equal(found[name], stored[name]), name
