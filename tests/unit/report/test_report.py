"""The report: complete from complete inputs, useful from partial ones, safe whatever is written in them."""

import json
from html.parser import HTMLParser

import pytest

from deepspec.config.schema import Config
from deepspec.errors import InputRefused
from deepspec.report.build import build_report
from deepspec.report.compare import find_runs, pooled_length
from deepspec.report.inputs import main_setting, read_run_files, settings, speeds
from deepspec.report.running import curve, redact
from deepspec.report.sorting import SCRIPT, content_policy
from deepspec.report.summary import summary_table
from deepspec.report.svg import Row, Series, line_chart, number, row_chart, ticks
from deepspec.stages import report as stage
from tests.unit.report.make_run import LENGTH, make_run, setting

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Every tag is closed in order; nothing is fetched, and nothing runs but the script that sorts tables."""

    def __init__(self):
        super().__init__()
        self.stack, self.tags, self.ids, self.links, self.text = [], [], set(), [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        assert tag not in ("link", "img", "iframe", "object"), tag
        assert not any(name.startswith("on") or name == "src" for name in attrs), attrs
        if "id" in attrs:
            assert attrs["id"] not in self.ids
            self.ids.add(attrs["id"])
        if "href" in attrs:
            self.links.append(attrs["href"])
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            assert data == SCRIPT
        else:
            self.text.append(data)


def check(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.stack == [] and checker.tags.count("script") == 1
    assert content_policy() in html and content_policy().startswith("default-src 'none'")
    assert all(link.startswith("#") and link[1:] in checker.ids for link in checker.links)
    assert "url(" not in html and "@import" not in html and "NaN" not in html and "None" not in " ".join(checker.text)
    return checker


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def test_full_report_has_every_section_and_figure(run):
    html = build_report(read_run_files(run))
    checker = check(html)
    for anchor in ("acceptance", "positions", "speed", "confidence", "training", "profile", "stages", "configuration",
                   "environment", "thresholds", "serving"):
        assert anchor in checker.ids
    assert checker.tags.count("figure") == 19 and "Make it with" not in html
    text = " ".join(checker.text)
    for words in ("noise floor", "Higher is better", "untrained drafter", "refitted", "2.13.0", "2 CPU cores",
                  "+1.50 tokens per round (95 % interval +1.30 to +1.70)", "1 of 2 answers equal",
                  "dspark draft model", "folded into the head", "All other positions", "best threshold"):
        assert words in text, words
    assert "Best speed-up here" in text and "1.45x" in text and "2.50" in text


def test_every_figure_has_a_caption_and_a_description(run):
    html = build_report(read_run_files(run))
    assert html.count("<figure>") == html.count("<figcaption>") == html.count('role="img" aria-label="')


def test_secrets_of_the_configuration_are_not_shown(run):
    html = build_report(read_run_files(run))
    assert "very-secret" not in html and "user:pass" not in html and "key=abc" not in html
    assert redact({"max_tokens": 5, "hf_token": "x", "wandb": {"password": "p"}, "api_key": ""}) == {
        "max_tokens": 5, "hf_token": "(hidden)", "wandb": {"password": "(hidden)"}, "api_key": ""}


def test_missing_inputs_name_their_commands(tmp_path):
    html = build_report(read_run_files(tmp_path))
    check(html)
    for command in ("launch/train_drafter.py", "launch/evaluate_drafter.py", "launch/calibrate.py",
                    "launch/profile_throughput.py"):
        assert command in html
    assert "<figure>" not in html


def test_hostile_names_are_escaped(tmp_path):
    run = make_run(tmp_path / "r", name="<script>alert(1)</script>")
    evaluation = json.loads((run / "evaluation.json").read_text())
    values = evaluation["settings"].pop("t1_fixed_b1")
    values["domains"] = {'"><img src=x onerror=y>': values["domains"]["math"]}
    values["benchmarks"] = {"<b>&": values["benchmarks"]["math_set"]}
    evaluation["settings"] = {"<i>fixed": values}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    html = build_report(read_run_files(run))
    check(html)
    assert html.count("<script>") == 1 and "<img" not in html and "&lt;script&gt;" in html


@pytest.mark.parametrize("name, content", [
    ("evaluation.json", "{"), ("evaluation.json", "[1]"), ("evaluation.json", '{"settings": {"a": 3}}'),
    ("calibration.json", "{}"), ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo'),
    ("confidence/records.npz", "torn"), ("profile/sps.json", "{}"), ("manifest.json", "null"),
    ("metrics.jsonl", 'x\n{"step": 1}\n'),
])
def test_broken_inputs_are_noted_and_the_rest_is_shown(tmp_path, name, content):
    run = make_run(tmp_path / "r", steps=5)
    (run / name).write_text(content)
    files = read_run_files(run)
    html = build_report(files)
    check(html)
    assert html.count("<figure>") >= 5
    assert all(problem.startswith(name.split("/")[-1]) for problem in files.problems)
    assert summary_table(run)


def test_speeds_pair_the_ways_of_decoding(run):
    found = {one.batch_size: one for one in speeds(read_run_files(run).evaluation)}
    assert (found[1].none, found[1].fixed, found[1].scheduled) == (40.0, 55.0, 58.0)
    assert (found[8].none, found[8].fixed, found[8].scheduled) == (120.0, 90.0, 130.0)


def test_a_skipped_way_of_decoding_says_why(tmp_path):
    run = make_run(tmp_path / "r", steps=5)
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["skipped"] = {"scheduled": "no <profile>"}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    assert "scheduled was left out: no &lt;profile&gt;" in build_report(read_run_files(run))
    assert "scheduled: left out, no <profile>" in summary_table(run)


def test_main_setting_is_full_verification_of_the_trained_drafter(run):
    evaluation = read_run_files(run).evaluation
    assert main_setting(evaluation).name == "t1_fixed_b1"
    assert main_setting(evaluation, untrained=True).name == "t1_fixed_b8_untrained"
    without = setting("x", 0.5, 1.0)
    del without["decoding"]
    assert settings({"settings": {"t0-scheduled": without}})[0].decoding == "scheduled"
    assert main_setting({}) is None and pooled_length(read_run_files(run)) == 2.5


def test_summary_table(run):
    text = summary_table(run)
    for words in ("math", "3.58", "3.46-3.70", "untrained", "1.41", "noise floor", "scheduled", "130", "report",
                  "export_drafter.py"):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 160


def test_comparison_of_runs(run):
    make_run(run.parent / "bigger", "bigger", 0.9, 700)
    others = find_runs(["bigger", str(run)], run.parent)
    html = build_report(read_run_files(run), others)
    assert "comparison" in check(html).ids and "bigger" in html
    alone = build_report(read_run_files(run.parent / "absent"), others)
    assert check(alone).ids == {"comparison"}
    with pytest.raises(InputRefused, match="'nope' is not the directory or name of a run.*bigger, tiny"):
        find_runs(["nope"], run.parent)


def test_stage_writes_one_file(run):
    config = Config()
    config.run.dir = str(run)
    stage.run(config)
    page = (run / "report.html").read_text()
    check(page)
    assert len(page) < 300_000 and page.count('name="viewport"') == 1


def test_curve_averages_long_runs():
    metrics = [{"step": step, "loss": float(step)} for step in range(1, 1001)]
    averaged = curve(metrics, "loss", "loss")
    assert len(averaged.x) == 250 and averaged.y[0] == 2.5
    assert curve([{"step": 1, "loss": None}], "loss", "l").x == []


def test_charts_without_data_are_empty():
    assert line_chart([Series("a", [], [])], x_label="x", y_label="y", description="d") == ""
    assert line_chart([Series("a", [1, 2], [None, None])], x_label="x", y_label="y", description="d") == ""
    assert row_chart([Row("a", [None])], ["s"], x_label="x", description="d", bars=True) == ""


def test_charts_with_one_point_and_constant_values():
    for series in (Series("a", [3], [0.5]), Series("a", [1, 2, 3], [2.0, 2.0, 2.0])):
        assert "<circle" in line_chart([series], x_label="x", y_label="y", description="d")
    assert "<circle" in line_chart([Series("a", [8], [1.0])], x_label="x", y_label="y", description="d", x_log=True)


def test_a_gap_breaks_the_line():
    chart = line_chart([Series("a", [1, 2, 3, 4], [1, None, 2, 3])], x_label="x", y_label="y", description="d")
    assert chart.count('d="M') == 1 and chart.split('d="')[1].split('"')[0].count("M") == 2


def test_ticks_and_numbers():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and len(ticks(3, 97)) <= 7
    assert [number(value) for value in (None, 0, 0.01234, 3.14159, 1234.5, float("nan"))] == [
        "\N{EN DASH}", "0", "0.0123", "3.14", "1,234", "\N{EN DASH}"]
    assert LENGTH == 4
