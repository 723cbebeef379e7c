"""The job ``launch/closed_loop.py``: from what a drafter in service met to the drafter that replaces it.

Records of service are compared with the calibration (drift report); by its verdict the temperatures are fitted again,
or the drafter is trained on from its own weights with the requests that were logged. The result is exported, served,
examined by the doctor, and compared with the drafter in service on held-out requests.
"""

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import httpx

from deepspec import distributed
from deepspec.artifacts import atomic_write_json
from deepspec.config.compose import compose_config, parse_overrides
from deepspec.config.paths import responses_dir, run_dir
from deepspec.config.schema import BenchmarkConfig, Config, draft_length
from deepspec.data.rendering import Renderer
from deepspec.doctor import run as doctor
from deepspec.errors import InputRefused
from deepspec.evaluation.benchmarks import first_requests, load_benchmark
from deepspec.evaluation.succession import DecodeOptions, compare_drafters
from deepspec.stages import calibrate
from deepspec.stages.pipeline import run_stages
from deepspec.training.checkpoint import load_drafter
from deepspec.training.session import chosen_checkpoint, load_run

log = logging.getLogger(__name__)
LOOP_FILE = "loop.json"
BEFORE = "calibration.before.json"
_STAGES = ("prompts", "responses", "features", "train", "confidence", "calibrate", "profile", "evaluate", "export")
_OWN = ("loop", "doctor", "data", "stages", "run.dir", "run.name", "drafter.init_from", "drafter.warm_start", "runs")


def drift(config: Config) -> Optional[dict[str, Any]]:
    """The drift report of ``loop.records`` (drift.json); None without records."""
    if config.loop.records is None:
        return None
    calibrate.run(replace(config, calibration=replace(config.calibration, records=config.loop.records,
                                                      recalibrate=False)))
    path = run_dir(config) / calibrate.DRIFT_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def choose(config: Config, report: Optional[dict[str, Any]]) -> tuple[str, str]:
    """What to do (none | recalibrate | train), and why."""
    if config.loop.action != "auto":
        return config.loop.action, "loop.action says so"
    if report is None:
        return "train", "there are requests to train on and no records to measure drift with"
    verdict = report["verdict"]
    if verdict["action"] == "train" and config.loop.requests is None:
        raise InputRefused(f"The drift report says to train ({verdict['reason']}), but loop.requests names no log of "
                           "requests. Give one, or choose loop.action=recalibrate.")
    return verdict["action"], verdict["reason"]


def successor(config: Config, overrides: Sequence[str]) -> Config:
    """The run that trains on from this one's export, with the logged requests as its prompts."""
    directory = run_dir(config)
    name = config.loop.name or f"{config.run.name}-next"
    kept = []
    for text in overrides:
        key = parse_overrides([text])[0].key_or_group
        if key not in _OWN and key.split(".")[0] not in ("loop", "doctor", "data"):
            kept.append(text)
    kept += [f"run.name={name}", f"run.dir={directory.parent / name}", f"drafter.init_from={directory / 'export'}",
             "data=requests", f"data.sources.0.path={config.loop.requests}"]
    kept += [f"data.{key}={value}" for key, value in (
        ("max_length", config.data.max_length), ("min_held_out", config.data.min_held_out),
        ("held_out_fraction", config.data.held_out_fraction))]
    if config.loop.steps is not None:
        kept.append(f"trainer.max_steps={config.loop.steps}")
    if distributed.rank() == 0:
        atomic_write_json(directory.parent / name / "overrides.json", kept)
    return compose_config(kept)


@contextlib.contextmanager
def served(config: Config, folder: Path) -> Iterator[Optional[str]]:
    """The address of a server of ``folder``: ``loop.serve`` started for as long as it is needed, or one that runs."""
    options = config.loop
    if options.serve is None or options.endpoint is None:
        yield options.endpoint
        return
    command = options.serve.replace("{drafter}", shlex.quote(str(folder.absolute())))
    command = command.replace("{tokens}", str(draft_length(config.drafter)))
    log.info("starting %s", command)
    with open(folder.parent / "loop_server.log", "wb") as output:
        process = subprocess.Popen(command, shell=True, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(process, options.endpoint, time.monotonic() + options.start_seconds, Path(output.name))
            yield options.endpoint
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)


def _wait(process: "subprocess.Popen[bytes]", endpoint: str, deadline: float, output: Path) -> None:
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{endpoint.rstrip('/')}/health", timeout=5.0).status_code == 200:
                return
        time.sleep(1.0)
    raise InputRefused(f"loop.serve did not bring up a server at {endpoint}. Its output is in {output}; "
                       "loop.start_seconds bounds the wait.")


def examine(config: Config) -> Optional[dict[str, Any]]:
    """The doctor's document about the served successor; None where nothing serves it."""
    folder = run_dir(config) / "export"
    with served(config, folder) as endpoint:
        if endpoint is None:
            log.warning("no doctor: give loop.endpoint (and loop.serve, the command that serves {drafter} there)")
            return None
        told = replace(config, doctor=replace(config.doctor, endpoint=endpoint, drafter=str(folder)))
        doctor.run(told)
    return json.loads((run_dir(config) / "doctor" / doctor.REPORT).read_text(encoding="utf-8"))


def compare(before: Config, after: Config) -> dict[str, Any]:
    """Both drafters on the successor's held-out requests."""
    options = after.evaluate
    new = load_run(after)
    old = load_drafter(chosen_checkpoint(before), new.shared, before.export.weights).to(new.drafter.dtype)
    renderer = Renderer(new.target.tokenizer, after.target.thinking, after.target.name)
    benchmark = load_benchmark(BenchmarkConfig(name="requests", path="held_out"), responses_dir(after))
    requests = first_requests(benchmark.conversations, renderer)
    return compare_drafters(new.target, old.requires_grad_(False), new.drafter, requests, DecodeOptions(
        options.temperatures[0], options.batch_size, options.max_new_tokens, options.bootstrap, after.run.seed))


def paragraph(found: dict[str, Any]) -> str:
    """What was done and what came of it."""
    parts = [f"{found['action'].capitalize()}: {found['reason']}."]
    if found.get("doctor"):
        parts.append(f"Doctor: {found['doctor']['verdict']}")
    measured = found.get("comparison")
    if measured:
        low, high = measured["acceptance"]["interval"]
        parts.append(f"On held-out requests the successor accepts {measured['successor']['acceptance_length']:.2f} "
                     f"tokens per round, the drafter in service {measured['in_service']['acceptance_length']:.2f} "
                     f"(paired difference {measured['acceptance']['effect']:+.3f}, 95 % {low:+.3f} to {high:+.3f}).")
        if measured["speedup"] is not None:
            low, high = measured["speedup_ci95"]
            parts.append(f"By Eq. 1 it needs 1/{measured['speedup']:.3f} of the time per token (95 % {low:.3f} to "
                         f"{high:.3f}): {measured['better']} is better.")
    ece = found.get("ece")
    if ece:
        parts.append(f"Mean ECE of the cumulative product {ece['before']:.4f} with the temperatures in service, "
                     f"{ece['after']:.4f} with the new ones (noise floor {ece['noise_floor']:.4f}).")
    return " ".join(parts)


def _recalibrated(config: Config, report: Optional[dict[str, Any]]) -> tuple[Config, dict[str, Any]]:
    """Fit again on the records and export; the calibration that was in place is kept beside."""
    path = run_dir(config) / calibrate.CALIBRATION_FILE
    if path.is_file() and distributed.rank() == 0:
        shutil.copyfile(path, path.with_name(BEFORE))
    changed = replace(config, calibration=replace(config.calibration, records=config.loop.records, recalibrate=True))
    run_stages(changed, ("calibrate", "export"))
    fitted = json.loads(path.read_text(encoding="utf-8"))
    after = [value for value in fitted["ece_after"] if value is not None]
    floor = [value for value in fitted["ece_noise_floor"] if value is not None]
    if report is None or not after:
        return changed, {}
    return changed, {"ece": {"before": report["ece"], "after": sum(after) / len(after),
                             "noise_floor": sum(floor) / len(floor)}}


def run(config: Config, overrides: Sequence[str]) -> int:
    """Go round once. Returns 0, or the doctor's exit code when the served successor has a fault."""
    report = drift(config)
    action, reason = choose(config, report)
    found: dict[str, Any] = {"schema_version": 1, "action": action, "reason": reason, "drift": report}
    after = config
    if action == "recalibrate":
        after, more = _recalibrated(config, report)
        found |= more
    elif action == "train":
        after = successor(config, overrides)
        after = replace(after, loop=config.loop, doctor=config.doctor)
        run_stages(after, _STAGES)
    if distributed.rank() != 0:
        return 0
    if action != "none":
        found["doctor"] = examine(after)
    if action == "train":
        found["comparison"] = compare(config, after)
    found["successor"] = str(run_dir(after) / "export")
    atomic_write_json(run_dir(after) / LOOP_FILE, found)
    sys.stdout.write(f"\n{paragraph(found)}\n\n{run_dir(after) / LOOP_FILE}\n")
    ill = found.get("doctor") is not None and not found["doctor"]["healthy"]
    return doctor.FAULT_FOUND if ill else 0
