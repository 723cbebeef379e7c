"""One temperature and shift inside the head: recovered, undone, applied once, and the tables consistent with it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepspec.calibration import Calibration, ConfidenceRecords, Fold, RecordsOrigin, calibrate, sigmoid
from deepspec.calibration.fold import fit_fold, fit_scale
from deepspec.config.schema import CalibrationConfig
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.errors import InputRefused
from deepspec.export.bundle import sts_values
from deepspec.export.evidence import Evidence
from deepspec.export.fold import KEY, config_entry, fold_head, fold_of, folded_evidence
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.tiny import tiny_drafter, tiny_target

SHA = "d" * 64


def shifted_records(fold: Fold, blocks: int = 24000, length: int = 5, seed: int = 0) -> ConfidenceRecords:
    """Blocks whose token k survives with probability sigmoid(z / T + s)."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.5, 2.0, size=(blocks, length)).astype(np.float32)
    kept = random.random((blocks, length)) < sigmoid(fold.apply(logits))
    names = np.array([f"c{i % 150:04d}" for i in range(blocks)])
    return ConfidenceRecords(
        RecordsOrigin(length, SHA, 1.0, (1.0,) * length), logits, np.cumprod(kept, axis=1).sum(axis=1),
        np.full(blocks, length), np.full((blocks, length), np.nan, np.float32), names, np.full(blocks, "math"))


def test_fit_recovers_temperature_and_shift():
    true = Fold(2.0, -0.7)
    found = fit_fold(shifted_records(true))
    assert found.temperature == pytest.approx(2.0, rel=0.06) and found.shift == pytest.approx(-0.7, abs=0.05)


def test_known_rates_are_preferred_to_outcomes():
    true = Fold(1.6, 0.4)
    records = shifted_records(true, blocks=300)
    found = fit_fold(replace(records, analytic_rate=sigmoid(true.apply(records.logits)).astype(np.float32)))
    assert found.temperature == pytest.approx(1.6, rel=1e-3) and found.shift == pytest.approx(0.4, abs=1e-3)


def test_scale_agrees_with_a_solver_that_is_not_ours():
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(3)
    x = random.normal(3.0, 5.0, 3000)
    y = random.random(3000) < sigmoid(0.4 * x - 1.0)
    model = LogisticRegression(C=1e10, tol=1e-10, max_iter=1000).fit(x[:, None], y)
    slope, intercept = fit_scale(x, y)
    assert slope == pytest.approx(model.coef_[0, 0], rel=1e-4)
    assert intercept == pytest.approx(model.intercept_[0], rel=1e-4)


@pytest.mark.parametrize("x, y", [([], []), ([1.0], [1.0]), ([1.0, 2.0], [1, 1]), ([2.0, 2.0], [0, 1]),
                                  ([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1])])
def test_nothing_is_folded_without_a_maximum(x, y):
    assert fit_scale(np.array(x), np.array(y)) == (1.0, 0.0)


def test_a_confidence_that_ranks_backwards_is_left_alone():
    records = shifted_records(Fold())
    backwards = replace(records, logits=-records.logits)
    assert fit_fold(backwards).is_identity


def test_undo_is_the_inverse():
    logits = np.linspace(-9, 9, 21)
    fold = Fold(1.7, -0.4)
    assert np.allclose(fold.undo(fold.apply(logits)), logits)
    assert Fold().is_identity and not fold.is_identity


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(shifted_records(Fold(2.0, -0.7)), CalibrationConfig(bootstrap=20), refit_fraction=0.0)


def test_folding_beats_temperatures_where_a_shift_is_needed(calibration):
    """A temperature cannot move 0.5: with T alone the shift stays."""
    means = {name: values["ece_mean"] for name, values in calibration.methods.items()}
    assert means["folded"] < 0.5 * means["sts"] < means["raw"]
    assert means["folded_sts"] < 1.5 * np.mean(calibration.methods["folded_sts"]["noise_floor"])
    assert calibration.methods["folded"]["auc"] == calibration.methods["raw"]["auc"]
    assert calibration.folded.temperature == pytest.approx(2.0, rel=0.1)


def test_decoder_with_the_folded_head_sees_the_calibrated_confidence():
    """Exactly sigmoid(logit / T + s), for the very tokens the unfolded head saw."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.3)
    fold = Fold(1.9, -0.6)
    requests = [DecodeRequest(f"p{i}", tuple(range(3 + i, 9 + i))) for i in range(3)]

    def logits() -> np.ndarray:
        decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=1.0, seed=1), batch_size=3,
                                     max_new_tokens=16, mode="fixed", record=True)
        rounds = [item for result in sorted(decoder.decode(requests), key=lambda one: one.id)
                  for item in result.rounds if item.confidence_logits is not None]
        return np.stack([item.confidence_logits for item in rounds])

    raw = logits()
    fold_head(drafter, fold)
    folded = logits()
    assert raw.shape == folded.shape and len(raw) > 5 and np.abs(raw).max() > 0.05
    assert np.abs(sigmoid(folded) - sigmoid(raw / fold.temperature + fold.shift)).max() < 1e-6
    assert np.abs(sigmoid(folded) - sigmoid(raw)).max() > 0.01


def test_tables_of_a_folded_export_are_those_on_top_of_it(calibration, tmp_path):
    path = tmp_path / "calibration.json"
    calibration.save(path)
    values = json.loads(path.read_text())
    plain = Evidence(calibration=values)
    folded = folded_evidence(plain)
    assert sts_values(plain.calibration)["temperatures"] == list(calibration.temperatures)
    assert "confidence_fold" not in sts_values(plain.calibration) and config_entry(plain) == {}
    table = sts_values(folded.calibration)
    assert table["temperatures"] == table["sts_temperatures"] == calibration.fold["temperatures"]
    assert table["temperatures"] != list(calibration.temperatures)
    assert table["ece_before"] == calibration.methods["folded"]["ece"]
    assert table["confidence_fold"] == config_entry(folded)[KEY] == {
        "temperature": calibration.fold["temperature"], "shift": calibration.fold["shift"]}
    assert plain.calibration["temperatures"] == list(calibration.temperatures)  # the run's own stays as it was


def test_what_cannot_be_folded_is_refused():
    with pytest.raises(InputRefused, match="launch/calibrate.py"):
        folded_evidence(Evidence(absent={"calibration": "not there; make it with launch/calibrate.py"}))
    with pytest.raises(InputRefused, match="has no fold"):
        fold_of({"temperatures": [1.0]})
    with pytest.raises(InputRefused, match="no fold"):
        Calibration.identity(3).folded  # noqa: B018
