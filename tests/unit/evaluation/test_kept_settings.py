"""An evaluation with other estimators does not throw away what decoding measured before."""

from typing import Any

import pytest

from deepspec.evaluation.kept import with_kept

HEADER = {"schema_version": 1, "drafter": "d", "target_sha256": "t", "max_new_tokens": 8, "seed": 0}


def report(mode: str, *names: str, prompts: int = 5, **header: Any) -> dict[str, Any]:
    settings = {name: {"mode": mode, "benchmarks": {"math": {"num_prompts": prompts}}} for name in names}
    return HEADER | header | {"settings": settings, "default_setting": names[0], "macro": {"of": names[0]}}


def test_decoded_settings_stay_and_are_quoted() -> None:
    merged, kept = with_kept(report("analytic", "t1-analytic"), report("sampled", "t1-fixed", "t1-none"))
    assert kept == ["t1-fixed", "t1-none"] and set(merged["settings"]) == {"t1-analytic", "t1-fixed", "t1-none"}
    assert merged["default_setting"] == "t1-fixed" and merged["macro"] == {"of": "t1-fixed"}


def test_what_is_measured_again_replaces_what_was() -> None:
    old, new = report("sampled", "t1-fixed", "t0-fixed"), report("sampled", "t1-fixed")
    merged, kept = with_kept(new, old)
    assert kept == ["t0-fixed"] and merged["settings"]["t1-fixed"] is new["settings"]["t1-fixed"]
    assert merged["default_setting"] == "t1-fixed" and merged["macro"] is new["macro"]


@pytest.mark.parametrize("change", [{"drafter": "e"}, {"target_sha256": "u"}, {"seed": 1}, {"max_new_tokens": 9},
                                    {"prompts": 6}])
def test_nothing_is_kept_of_another_measurement(change: dict[str, Any]) -> None:
    new = report("analytic", "t1-analytic")
    assert with_kept(new, report("sampled", "t1-fixed", **change)) == (new, [])
    assert with_kept(new, {}) == (new, []) and with_kept(new, {"settings": 3} | HEADER) == (new, [])
