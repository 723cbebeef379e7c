"""Metrics, Sequential Temperature Scaling and calibration.json on records whose true calibration is known."""

import json
import logging

import numpy as np
import pytest

from deepspec.calibration import (
    Calibration, ConfidenceRecords, RecordsOrigin, auc, bootstrap_ece, brier, calibrate, ece_noise_floor,
    expected_calibration_error, fit_temperatures, reliability_curve, sigmoid, split_conversations, survival_probability,
    temperature_grid,
)
from deepspec.config.schema import CalibrationConfig
from deepspec.errors import InputRefused

TRUE_T = np.array([2.0, 1.8, 1.6, 1.4, 1.3, 1.2, 1.0])


def make_records(blocks=24000, conversations=120, temperatures=TRUE_T, seed=0, center=1.0, origin_temperatures=None):
    """Blocks whose token k survives with probability sigmoid(logit_k / T_k): over-confident where T_k > 1."""
    random = np.random.default_rng(seed)
    length = len(temperatures)
    logits = random.normal(center * temperatures, 1.5 * temperatures, size=(blocks, length)).astype(np.float32)
    kept = random.random((blocks, length)) < sigmoid(logits / temperatures)
    accepted = np.cumprod(kept, axis=1).sum(axis=1)
    names = np.array([f"c{i % conversations:04d}" for i in range(blocks)])
    domains = np.array([("math", "code", "chat")[(i % conversations) % 3] for i in range(blocks)])
    origin = RecordsOrigin(length, "d" * 64, 1.0, origin_temperatures or (1.0,) * length)
    return ConfidenceRecords(origin, logits, accepted, np.full(blocks, length),
                             np.full((blocks, length), np.nan, dtype=np.float32), names, domains)


def test_survival_is_the_cumulative_product():
    confidence = np.array([[0.9, 0.5, 0.5], [1.0, 0.0, 0.7]])
    assert np.allclose(survival_probability(confidence), [[0.9, 0.45, 0.225], [1.0, 0.0, 0.0]])


def test_sigmoid_is_finite_far_out():
    assert np.allclose(sigmoid([-1e4, -40.0, 0.0, 40.0, 1e4]), [0.0, 0.0, 0.5, 1.0, 1.0])


def test_expected_calibration_error_by_hand():
    predicted, label = [0.02, 0.04, 0.52, 1.0], [0, 1, 1, 1]
    # bins: {0.02, 0.04} gap |0.03 - 0.5| * 2/4; {0.52} gap 0.48 / 4; {1.0} in the last bin, gap 0
    assert expected_calibration_error(predicted, label) == pytest.approx(0.47 * 0.5 + 0.48 * 0.25)
    mean, outcome, count = reliability_curve(predicted, label)
    assert np.allclose(mean, [0.03, 0.52, 1.0]) and np.allclose(outcome, [0.5, 1, 1]) and np.allclose(count, [2, 1, 1])


def test_metrics_without_samples_are_nan_and_never_raise():
    assert all(np.isnan(f([], [])) for f in (expected_calibration_error, brier, auc))
    assert np.isnan(ece_noise_floor([])) and all(np.isnan(bootstrap_ece([], [], [])))


def test_auc_equals_pair_counting_with_ties():
    random = np.random.default_rng(1)
    score, label = random.integers(0, 6, 60), random.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in score[label] for b in score[~label]]
    assert auc(score, label) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc([0.1, 0.2], [1, 1]))


def test_brier():
    assert brier([1.0, 0.5], [0, 1]) == pytest.approx((1 + 0.25) / 2)


def test_noise_floor_is_what_a_perfect_head_shows():
    random = np.random.default_rng(2)
    predicted = random.random(4000)
    seen = [expected_calibration_error(predicted, random.random(4000) < predicted) for _ in range(50)]
    floor = ece_noise_floor(predicted)
    assert floor == pytest.approx(np.mean(seen), rel=0.1) and floor == ece_noise_floor(predicted)
    assert ece_noise_floor(predicted[:1000]) > 1.5 * floor


def test_bootstrap_draws_whole_conversations():
    """Ten copies of each block in one conversation must not narrow the interval."""
    random = np.random.default_rng(3)
    predicted = random.random(300)
    label = random.random(300) < predicted ** 2
    single = bootstrap_ece(predicted, label, np.arange(300), draws=400)
    copies = bootstrap_ece(np.repeat(predicted, 10), np.repeat(label, 10), np.repeat(np.arange(300), 10), draws=400)
    assert copies == pytest.approx(single, abs=0.01)
    assert single[0] < single[1]


def test_grid_holds_one_and_the_paper_values():
    grid = temperature_grid()
    assert len(grid) == 41 and grid[0] == 1.0 and grid.min() == pytest.approx(0.1) and grid.max() == pytest.approx(10)
    assert 1.0 in temperature_grid(0.15, 9.0, 10)


def test_temperatures_recover_an_over_confident_head():
    records = make_records()
    fit = fit_temperatures(records.logits, records.accepted)
    step = 10 ** (2 / 40)
    assert np.abs(np.log(np.array(fit.temperatures[:4]) / TRUE_T[:4])).max() < 2.1 * np.log(step)
    assert fit.positions_without_data == () and fit.samples[0] == len(records)


def test_temperature_one_stays_where_nothing_improves():
    logits = np.zeros((400, 3))  # sigmoid is 0.5 at every temperature: a tie everywhere
    fit = fit_temperatures(logits, np.arange(400) % 4)
    assert fit.temperatures == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("accepted", [np.zeros(50, int), np.full(50, 3), np.full(50, 7), np.array([2])])
def test_positions_nobody_reached_keep_one_and_say_so(accepted, caplog):
    random = np.random.default_rng(4)
    with caplog.at_level(logging.WARNING):
        fit = fit_temperatures(random.normal(size=(len(accepted), 7)), accepted)
    assert np.isfinite(fit.temperatures).all() and min(fit.temperatures) > 0
    missing = tuple(range(int(accepted.max()) + 2, 8))
    assert fit.positions_without_data == missing
    assert all(fit.temperatures[k - 1] == 1.0 for k in missing)
    assert not missing or "0 samples at positions" in caplog.text
    assert not fit.positions_at_grid_edge or "edge of the grid" in caplog.text


def test_outcomes_beyond_the_draft_are_not_used():
    records = make_records(4000)
    short = np.where(np.arange(4000) % 2, 3, 7)
    cut = fit_temperatures(records.logits, np.minimum(records.accepted, short), short)
    full = fit_temperatures(records.logits[short == 7], records.accepted[short == 7])
    assert cut.samples[0] == 4000 and cut.samples[5] == full.samples[5]


def test_split_never_cuts_a_conversation_and_covers_domains():
    records = make_records(3000, conversations=30)
    part = split_conversations(records.conversation, records.domain, refit_fraction=0.34, fit_fraction=0.5)
    owner = {}
    for name, label in zip(records.conversation, part):
        assert owner.setdefault(name, label) == label
    sizes = {label: sum(value == label for value in owner.values()) for label in ("refit", "fit", "report")}
    assert sizes == {"refit": 10, "fit": 10, "report": 10}
    for label in sizes:
        assert set(records.domain[part == label]) == {"math", "code", "chat"}
    shuffled = np.random.default_rng(0).permutation(3000)
    again = split_conversations(records.conversation[shuffled], records.domain[shuffled], refit_fraction=0.34,
                                fit_fraction=0.5)
    assert (again == part[shuffled]).all()


@pytest.mark.parametrize("total, expected", [(1, {"fit"}), (2, {"fit", "report"}), (3, {"refit", "fit", "report"})])
def test_split_of_very_few_conversations(total, expected):
    names = np.array([f"c{i}" for i in range(total)])
    part = split_conversations(names, np.full(total, "chat"), refit_fraction=0.34, fit_fraction=0.5)
    assert set(part) == expected


def test_calibrate_lowers_ece_on_unseen_conversations():
    result = calibrate(make_records(30000), CalibrationConfig(bootstrap=50), refit_fraction=0.34)
    assert min(result.ece_before[:3]) > 0.03
    assert max(result.ece_after) < 0.02
    assert sum(result.ece_after) < 1.6 * sum(result.ece_noise_floor)
    assert all(after <= before for before, after in zip(result.brier_before[:4], result.brier_after[:4]))
    assert 0.6 < result.auc[0] < 0.95
    low, high = result.ece_before_ci95[0]
    assert low <= result.ece_before[0] <= high
    assert sum(result.domains.values()) == result.num_samples == result.report_split["blocks"]
    assert "needed and brought" in result.verdict


def test_verdict_for_a_head_that_was_right_already():
    result = calibrate(make_records(8000, temperatures=np.ones(4)), CalibrationConfig(bootstrap=0), refit_fraction=0)
    assert "hardly needed" in result.verdict


def test_whether_calibration_is_needed_is_said_with_its_numbers():
    right = calibrate(make_records(30000, temperatures=np.ones(4)), CalibrationConfig(bootstrap=50), refit_fraction=0)
    assert right.need["needed"] is False and right.need["blocks"] == right.num_samples
    assert "does not need calibration" in right.verdict and f"{right.need['excess']:.4f}" in right.verdict
    wrong = calibrate(make_records(8000), CalibrationConfig(bootstrap=50), refit_fraction=0)
    assert wrong.need["needed"] is True and wrong.need["excess_ci95"][0] > 0
    few = calibrate(make_records(300, temperatures=np.ones(4)), CalibrationConfig(bootstrap=50), refit_fraction=0)
    assert few.need["needed"] is None


def test_calibration_json_round_trip(tmp_path):
    records = make_records(600, conversations=12, center=-3.0)  # nobody reaches the last positions
    result = calibrate(records, CalibrationConfig(bootstrap=20), refit_fraction=0.34)
    path = tmp_path / "calibration.json"
    result.save(path)
    stored = json.loads(path.read_text())
    for name in ("schema_version", "drafter_sha256", "block_size", "temperatures", "sts_temperatures", "ece_before",
                 "ece_after", "ece_noise_floor", "auc", "brier_before", "brier_after", "num_samples", "num_bins",
                 "domains", "fit_split", "report_split"):
        assert name in stored, name
    assert stored["sts_temperatures"] == stored["temperatures"] and len(stored["auc"]) == 7
    assert None in stored["auc"] and "NaN" not in path.read_text()
    assert stored["positions_without_data"] and Calibration.load(path) == result


def test_wrong_calibration_is_refused_by_name(tmp_path):
    path = tmp_path / "calibration.json"
    Calibration.identity(7, "a" * 64).save(path)
    assert Calibration.load(path, block_size=7, drafter_sha256="a" * 64).temperatures == (1.0,) * 7
    with pytest.raises(InputRefused, match="block_size is 7"):
        Calibration.load(path, block_size=5)
    with pytest.raises(InputRefused, match="drafter_sha256"):
        Calibration.load(path, drafter_sha256="b" * 64)
    path.write_text("[]")
    with pytest.raises(InputRefused, match="not a calibration"):
        Calibration.load(path)
    with pytest.raises(InputRefused, match="launch/calibrate.py"):
        Calibration.load(tmp_path / "absent.json")


def test_apply_divides_each_position_by_its_temperature():
    calibration = Calibration.identity(3)
    logits = np.array([[1.0, -2.0, 0.5]])
    assert np.allclose(calibration.apply(logits), sigmoid(logits))
    assert calibration.apply(logits[:, :2]).shape == (1, 2)
    with pytest.raises(ValueError, match="4 positions"):
        calibration.apply(np.zeros((1, 4)))


def test_calibrate_refuses_a_single_conversation():
    with pytest.raises(InputRefused, match="at least 2"):
        calibrate(make_records(50, conversations=1), CalibrationConfig(), refit_fraction=0.34)


def test_records_round_trip_and_refusals(tmp_path):
    records = make_records(100, conversations=5)
    path = tmp_path / "records.npz"
    records.save(path)
    loaded = ConfidenceRecords.load(path, block_length=7, drafter_sha256="d" * 64, sampling_temperature=1.0)
    assert loaded.origin == records.origin and (loaded.logits == records.logits).all()
    assert (loaded.conversation == records.conversation).all()
    for name, value in (("block_length", 5), ("drafter_sha256", "e" * 64), ("sampling_temperature", 0.0)):
        with pytest.raises(InputRefused, match=name):
            ConfidenceRecords.load(path, **{name: value})
    make_records(100, temperatures=TRUE_T[:2], origin_temperatures=(1.0, 1.2)).save(path)
    with pytest.raises(InputRefused, match=r"temperatures is \(1.0, 1.2\)"):
        ConfidenceRecords.load(path)
    path.write_bytes(b"torn")
    with pytest.raises(InputRefused, match="not a file of confidence records"):
        ConfidenceRecords.load(path)


def test_records_of_a_diverged_drafter_are_refused():
    records = make_records(10)
    bad = records.logits.copy()
    bad[3, 2] = np.nan
    with pytest.raises(InputRefused, match="not finite"):
        records.with_logits(bad, "joint")


def test_concatenate_and_masks():
    records = make_records(40, conversations=4)
    both = ConfidenceRecords.concatenate([records.select(np.arange(10)), records.select(np.arange(10, 40))])
    assert (both.logits == records.logits).all() and len(both) == 40
    assert (records.survived <= records.reached).all()
    assert (records.reached[:, 0]).all()


@pytest.mark.parametrize("change", [
    {"temperatures": ["1"] * 7}, {"temperatures": 3}, {"temperatures": [1.0] * 6 + [-1.0]}, {"temperatures": None},
    {"methods": []}, {"fold": [1.0, 0.0]}, {"per_domain": 3}, {"block_size": "7"}, {"method": "platt"},
])
def test_an_edited_calibration_is_refused(tmp_path, change):
    path = tmp_path / "calibration.json"
    Calibration.identity(7).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputRefused, match="Make it again with launch/calibrate.py"):
        Calibration.load(path)


@pytest.mark.parametrize("fold", [{}, {"temperature": 0, "shift": 0}, {"temperature": None, "shift": 0},
                                  {"temperature": 1.0, "shift": "x"}, {"temperature": 1.0, "shift": float("nan")}])
def test_a_fold_that_is_none_is_refused(fold):
    with pytest.raises(InputRefused, match="fold"):
        Calibration(**vars(Calibration.identity(7)) | {"fold": fold}).folded
