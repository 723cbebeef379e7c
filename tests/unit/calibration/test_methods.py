"""Platt, beta and isotonic maps per position, the minimum of samples, domains, and what engines can use."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from deepspec.calibration import (
    Calibration, ConfidenceRecords, RecordsOrigin, calibrate, expected_calibration_error, fit_temperatures, sigmoid,
)
from deepspec.calibration.compare import compare_heads, weighted_auc
from deepspec.calibration.measure import excess, mean_ece_draws
from deepspec.calibration.methods import apply_map, apply_maps, fit_beta, fit_isotonic, fit_maps, fit_platt
from deepspec.calibration.metrics import auc
from deepspec.calibration.thresholds import best_threshold, threshold_sweep
from deepspec.config.schema import CalibrationConfig, Config
from deepspec.decoding.cost import CostTable, ProfileCell
from deepspec.decoding.policy import ThroughputScheduler
from deepspec.errors import ConfigError, InputRefused
from deepspec.planning.validate import validate
from deepspec.report.confidence import reliability_chart, report_split
from deepspec.report.svg import WIDTH, standalone


def records_of(rate, blocks=12000, length=4, seed=0, domains=("math", "code"), conversations=80):
    """Blocks whose token k survives with probability ``rate(sigmoid(z))``."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.8, 1.6, size=(blocks, length)).astype(np.float32)
    kept = random.random((blocks, length)) < rate(sigmoid(logits))
    names = np.array([f"c{i % conversations:04d}" for i in range(blocks)])
    part = np.array([domains[(i % conversations) % len(domains)] for i in range(blocks)])
    return ConfidenceRecords(RecordsOrigin(length, "d" * 64, 1.0, (1.0,) * length), logits,
                             np.cumprod(kept, axis=1).sum(axis=1), np.full(blocks, length),
                             np.full((blocks, length), np.nan, np.float32), names, part)


def bent(s):
    """A calibration curve no temperature can straighten."""
    return 0.25 + 0.5 * s ** 2


@pytest.mark.parametrize("fit", [fit_platt, fit_beta, fit_isotonic])
def test_each_map_rises_and_lowers_the_error(fit):
    random = np.random.default_rng(1)
    z = random.normal(0.5, 2.0, 6000)
    label = (random.random(6000) < bent(sigmoid(z))).astype(np.float64)
    one = json.loads(json.dumps(fit(z[:3000], label[:3000])))
    mapped = apply_map(one, z[3000:])
    assert ((mapped >= 0) & (mapped <= 1)).all()
    assert (np.diff(apply_map(one, np.sort(z))) >= -1e-12).all()
    before, after = (expected_calibration_error(values, label[3000:]) for values in (sigmoid(z[3000:]), mapped))
    assert after < 0.5 * before


def test_platt_and_beta_are_what_they_say():
    z = np.array([-2.0, 0.5])
    assert np.allclose(apply_map({"slope": 0.5, "intercept": 0.2}, z), sigmoid(0.5 * z + 0.2))
    s = sigmoid(z)
    odds = s ** 1.5 / (1 - s) ** 0.5 * np.exp(0.3)
    assert np.allclose(apply_map({"a": 1.5, "b": 0.5, "c": 0.3}, z), odds / (1 + odds))
    assert np.allclose(apply_map(None, z), s)
    assert np.allclose(apply_maps([None, {"slope": 1.0, "intercept": 1.0}], z[None]),
                       [[sigmoid(-2.0), sigmoid(1.5)]])


def test_beta_never_falls():
    random = np.random.default_rng(2)
    z = random.normal(size=4000)
    label = (random.random(4000) < sigmoid(-z)).astype(np.float64)  # ranks backwards
    one = fit_beta(z, label)
    assert one["a"] == one["b"] == 0.0 and apply_map(one, z)[0] == pytest.approx(label.mean(), abs=1e-6)


def test_positions_below_the_minimum_stay_raw_in_every_method():
    records = records_of(lambda s: 0.3 * s, blocks=3000)
    reached = records.reached.sum(axis=0)
    assert reached[1] > 100 > reached[3]
    scaling = fit_temperatures(records.logits, records.accepted, records.drafted, min_samples=100, warn=False)
    missing = [k + 1 for k in range(4) if reached[k] < 100]
    assert list(scaling.positions_without_data) == missing and missing
    assert all(scaling.temperatures[k - 1] == 1.0 for k in missing)
    maps = fit_maps("platt", records, 100)
    assert [k + 1 for k, one in enumerate(maps) if one is None] == missing
    kept = fit_temperatures(records.logits, records.accepted, min_samples=100, fallback=[3.0] * 4, warn=False)
    assert all(kept.temperatures[k - 1] == 3.0 for k in missing)


@pytest.fixture(scope="module")
def calibration():
    config = CalibrationConfig(method="isotonic", compare=["platt", "beta"], bootstrap=20, per_domain=True)
    return calibrate(records_of(bent), config, refit_fraction=0.0)


def test_methods_side_by_side_on_the_same_blocks(calibration, tmp_path):
    assert list(calibration.methods) == ["raw", "sts", "folded", "folded_sts", "isotonic", "platt", "beta"]
    means = {name: values["ece_mean"] for name, values in calibration.methods.items()}
    assert max(means["isotonic"], means["platt"], means["beta"]) < 0.5 * means["raw"]
    assert "none" in calibration.methods["isotonic"]["engines"] and "SGLang" in calibration.methods["sts"]["engines"]
    path = tmp_path / "calibration.json"
    calibration.save(path)
    loaded = Calibration.load(path)
    assert loaded == calibration and len(json.loads(path.read_text())["temperatures"]) == 4
    logits = np.array([[-1.0, 0.0, 1.0, 2.0]])
    assert np.allclose(loaded.apply(logits), apply_maps(calibration.methods["isotonic"]["parameters"], logits))
    assert not np.allclose(loaded.apply(logits), sigmoid(logits / np.array(loaded.temperatures)))


def test_a_confidence_that_is_right_is_left_alone():
    """Without the guard the search fits the noise of the bins, the more the fewer blocks there are."""
    fitted = [fit_temperatures(one.logits, one.accepted, noise_guard=guard, warn=False)
              for guard in (False, True) for seed in range(8) for one in [records_of(lambda s: s, 400, 2, seed)]]
    distance = [np.mean([abs(np.log(one.temperatures[0])) for one in part]) for part in (fitted[:8], fitted[8:])]
    assert distance[1] < 0.3 * distance[0] and sum(1 in one.positions_right_already for one in fitted[8:]) >= 6
    wrong = records_of(lambda s: sigmoid(np.log(s / (1 - s)) / 3.0), 400, 2)
    found = fit_temperatures(wrong.logits, wrong.accepted, noise_guard=True, warn=False)
    assert found.temperatures[0] > 1.8 and 1 not in found.positions_right_already


def test_our_scheduler_uses_the_method(calibration):
    cells = [ProfileCell(r, v, 64, 8, t, t, t, 0.2, t - 0.3, 0.1)
             for r in (1, 2) for v in (1, 3, 5) for t in [1.0 + 0.1 * r * v]]
    logits = np.array([[-1.0, 0.0, 1.0, 2.0], [0.3, 0.1, 0.0, 1.0]])
    found = ThroughputScheduler(CostTable.from_cells(cells), 4, temperatures=calibration).survival(logits, 2)
    assert np.allclose(found, np.cumprod(calibration.apply(logits), axis=1))
    temperatures = calibration.temperatures
    plain = ThroughputScheduler(CostTable.from_cells(cells), 4, temperatures=temperatures).survival(logits, 2)
    assert np.allclose(plain, np.cumprod(sigmoid(logits / np.array(temperatures)), axis=1))
    assert np.abs(found - plain).max() > 0.01


def test_method_without_its_maps_is_refused(calibration, tmp_path):
    path = tmp_path / "calibration.json"
    calibration.save(path)
    values = json.loads(path.read_text())
    del values["methods"]["isotonic"]["parameters"]
    path.write_text(json.dumps(values))
    with pytest.raises(InputRefused, match="no parameters"):
        Calibration.load(path)


def test_domains_that_differ_get_better_temperatures_of_their_own():
    math = records_of(lambda s: s, seed=4, domains=("math",), conversations=60)
    code = records_of(lambda s: sigmoid(np.log(s / (1 - s)) * 3.0), seed=5, domains=("code",), conversations=60)
    names = np.concatenate([np.char.add("m", math.conversation), np.char.add("k", code.conversation)])
    both = ConfidenceRecords.concatenate([math, code])
    mixed = ConfidenceRecords(both.origin, both.logits, both.accepted, both.drafted, both.analytic_rate, names,
                              both.domain)
    result = calibrate(mixed, CalibrationConfig(bootstrap=0, per_domain=True), refit_fraction=0.0).per_domain
    assert np.mean(result["code"]["ece_own"]) < 0.7 * np.mean(result["code"]["ece_pooled"])
    assert result["code"]["temperatures"][0] < 0.6 < result["math"]["temperatures"][0]
    assert "better" in result["code"]["note"] and "hardly" not in result["code"]["note"]


def test_domain_without_data_keeps_the_pooled_temperatures():
    records = records_of(bent, blocks=2000, domains=("math",) * 19 + ("chat",), conversations=20)
    result = calibrate(records, CalibrationConfig(bootstrap=0, per_domain=True, min_samples=150), refit_fraction=0.0)
    small = [one for one in result.per_domain.values() if one["fit_blocks"] < 150]
    assert all("temperatures" not in one and "wanted" in one["note"] for one in small)
    assert "temperatures" in result.per_domain["math"]


def test_excess_is_measured_above_the_floor_and_paired():
    records = records_of(lambda s: sigmoid(np.log(s / (1 - s)) / 2.0))
    raw, right = sigmoid(records.logits), sigmoid(records.logits / 2.0)
    found = excess(records, raw, right, num_bins=20, draws=200, seed=0)
    assert found["before"] > 10 * abs(found["after"]) and found["reduction"] > 0.9
    low, high = found["removed_ci95"]
    assert low < found["removed"] < high and low > 0
    low, high = found["after_ci95"]
    assert low < 0.003 and high > -0.003 and abs(found["after"]) < 0.003
    same = excess(records, raw, raw, num_bins=20, draws=50, seed=0)
    assert same["removed"] == 0.0 and same["removed_ci95"] == (0.0, 0.0)


def test_bootstrap_of_the_mean_ece_counts_what_the_metric_counts():
    records = records_of(bent, blocks=900)
    point, drawn = mean_ece_draws(records, sigmoid(records.logits), num_bins=20, draws=64, seed=1)
    survival = np.cumprod(sigmoid(records.logits), axis=1)
    by_hand = [expected_calibration_error(survival[:, k], records.survived[:, k]) for k in range(4)]
    assert point == pytest.approx(np.mean(by_hand)) and len(drawn) == 64 and drawn.std() > 0


def test_weighted_auc_equals_repeating_the_samples():
    random = np.random.default_rng(6)
    score, label, weights = random.integers(0, 5, 40), random.random(40) < 0.4, random.integers(0, 4, (3, 40))
    for row, value in zip(weights, weighted_auc(score, label, weights)):
        assert value == pytest.approx(auc(np.repeat(score, row), np.repeat(label, row)))
    assert np.isnan(weighted_auc([1.0], [1], [[1]])[0])


def test_heads_are_compared_on_the_same_samples():
    records = records_of(lambda s: s)
    noise = np.random.default_rng(7).normal(0, 2.0, records.logits.shape)
    found = compare_heads(records, records.logits + noise, records.logits, num_bins=20, draws=100, seed=0)
    assert found["auc"]["difference"] > 0.05 and found["auc"]["difference_ci95"][0] > 0
    assert found["brier"]["difference_ci95"][1] < 0 and found["ece"]["difference_ci95"][1] < 0
    same = compare_heads(records, records.logits, records.logits, num_bins=20, draws=20, seed=0)
    assert all(entry["difference"] == 0 and entry["difference_ci95"] == [0, 0] for entry in same.values())


def test_threshold_sweep_by_hand():
    origin = RecordsOrigin(2, "d" * 64, 1.0, (1.0, 1.0))
    confidence = np.array([[0.9, 0.9], [0.5, 0.5], [0.9, 0.2], [0.9, 0.9]])
    records = ConfidenceRecords(origin, np.zeros((4, 2), np.float32), np.array([2, 0, 1, 1]), np.array([2, 2, 2, 1]),
                                np.full((4, 2), np.nan, np.float32), np.array(list("abcd")), np.full(4, "math"))
    rows = threshold_sweep(records, confidence, (0.0, 0.4, 0.6, 0.95))  # the fourth block was cut: it does not count
    assert [row["verified"] for row in rows] == [2.0, pytest.approx(4 / 3), 1.0, 0.0]
    assert [row["acceptance_rate"] for row in rows] == [0.5, 0.75, 1.0, None]
    assert [row["tokens"] for row in rows] == [2.0, 2.0, 2.0, 1.0]
    best = best_threshold(rows, lambda verified: 1.0 + verified)
    assert best["threshold"] == 0.6 or best["tokens_per_second"] == 1.0
    assert best_threshold([], lambda verified: 1.0) is None


@pytest.mark.parametrize("change, message", [
    ({"method": "plat"}, "calibration.method='plat' is unknown.*Did you mean 'platt'"),
    ({"compare": ["sts", "spline"]}, "calibration.compare='spline'"),
    ({"min_samples": 0}, "calibration.min_samples=0"), ({"recalibrate": False}, "calibration.records"),
])
def test_options_are_checked(change, message):
    config = Config()
    config.run.name, config.target.name, config.target.path = "r", "t", "somewhere"
    for name, value in change.items():
        setattr(config.calibration, name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_folding_without_a_head_is_refused():
    config = Config()
    config.run.name, config.target.name, config.target.path = "r", "t", "somewhere"
    config.drafter.confidence_head, config.export.fold_calibration = False, True
    config.stages = ["export"]
    with pytest.raises(ConfigError, match="export.fold_calibration"):
        validate(config)


def test_diagrams_make_a_file_of_their_own(calibration):
    records = records_of(bent)
    charts = [(f"position {k + 1}", reliability_chart(report_split(records, calibration), calibration, k))
              for k in (0, 3)]
    root = ElementTree.fromstring(standalone(charts, ["before", "after < 1"]))
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.attrib["viewBox"].split()[2] == str(2 * WIDTH)
    text = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "position 4" in text and "after < 1" in text
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accepted, difference", [((1, 0, 0, 0), 0.0), ((0, 0, 0, 0), None)])
def test_heads_are_compared_where_draws_have_no_data(accepted, difference):
    """Draws without the one survivor have no AUC and are left out; without any survivor there is none to tell."""
    names = np.array(["a", "b", "c", "d"])
    records = ConfidenceRecords(RecordsOrigin(1, "d" * 64, 1.0, (1.0,)), np.float32([[2], [1], [0], [-1]]),
                                np.array(accepted), np.ones(4, np.int64), np.full((4, 1), np.nan, np.float32),
                                names, names)
    found = compare_heads(records, records.logits, records.logits + 1.0, num_bins=4, draws=40, seed=0)
    assert found["auc"]["difference"] == difference
    assert found["auc"]["difference_ci95"] == (None if difference is None else [0.0, 0.0])
    assert found["brier"]["difference"] is not None
