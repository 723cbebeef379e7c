"""report.html of one run, or of several."""

from typing import Sequence

from deepspec.report import confidence, quality, running
from deepspec.report.compare import comparison, pooled_length
from deepspec.report.inputs import RunFiles, interval, main_setting, speeds
from deepspec.report.learning import learning
from deepspec.report.page import Section, facts, page
from deepspec.report.serving import serving
from deepspec.report.svg import number

_SECTIONS = (
    quality.acceptance, quality.by_position, running.speed, confidence.reliability, confidence.thresholds,
    running.training, learning, running.profile, serving, running.stages, running.configuration, running.environment,
)


def _headline(files: RunFiles) -> str:
    """The numbers a reader came for."""
    items = []
    setting = main_setting(files.evaluation)
    length = pooled_length(files)
    if setting is not None and length is not None:
        bounds = interval(setting.macro)
        remark = f"95 % interval {bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else "mean over benchmarks"
        items.append(("Tokens per round", f"{length:.2f}", f"{remark}; 1 is no gain"))
    found = [one for one in speeds(files.evaluation) if one.none and (one.fixed or one.scheduled)]
    if found:
        best = max(found, key=lambda one: max(one.fixed or 0.0, one.scheduled or 0.0) / (one.none or 1.0))
        ratio = max(best.fixed or 0.0, best.scheduled or 0.0) / (best.none or 1.0)
        items.append(("Best speed-up here", f"{ratio:.2f}x", f"against the target alone, {best.label}"))
    if files.calibration is not None and files.calibration.ece_before[0] is not None:
        one = files.calibration
        means = [[value for value in values if value is not None] for values in (
            one.ece_before, one.ece_after, one.ece_noise_floor)]
        before, after, floor = (number(sum(values) / len(values), 2) for values in means)
        items.append(("Calibration error", f"{before} to {after}", f"before and after scaling; noise floor {floor}"))
    return facts(items) if items else ""


def build_report(files: RunFiles, others: Sequence[RunFiles] = ()) -> str:
    """HTML of ``files``, with a comparison on top if there are ``others``; of these alone if ``files`` is empty."""
    if others and files.empty:
        names = ", ".join(one.name for one in others)
        return page("Comparison of runs", names, "", [comparison(others)])
    sections: list[Section] = [comparison([files, *others])] if others else []
    sections += [section(files) for section in _SECTIONS]
    algorithm, target = files.option("drafter", "algorithm") or "", files.option("target", "name") or "its target"
    kind = f"A {algorithm} draft model for {target}: it proposes tokens,"
    return page(f"Draft model report: {files.name}", " ".join(kind.split()) + " the target verifies them.",
                _headline(files), sections,
                "Acceptance lengths include the bonus token. This page needs no network.")
