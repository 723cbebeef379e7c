"""The scripts there are: what each runs, which options it reads, and how it is started."""

import re
from dataclasses import dataclass
from typing import Optional

PREFIX = "deepspec-"  # of the console commands: deepspec-calibrate is launch/calibrate.py
_SCRIPT = re.compile(r"(?:\b(?:deepspeed|python) )?\b(?:launch|data_prep)/(\w+)\.py")


@dataclass(frozen=True)
class Script:
    """``stages`` None: those that the option ``stages`` names. ``job``: a module whose ``run`` runs instead of stages;
    options of the config group ``group`` may then be written without the group's name."""

    summary: str
    example: str  # what to write after the command
    sections: tuple[str, ...]  # config groups it reads, the most wanted first
    stages: Optional[tuple[str, ...]] = None
    job: Optional[str] = None
    group: Optional[str] = None
    folder: str = "launch"
    ranks: bool = False  # several ranks make it faster: it is started by the deepspeed launcher


_RUN = "run.dir=runs/tiny"
SCRIPTS = {
    "train_drafter": Script(
        "Runs every stage from prompts to report, or those named by stages; what is up to date is skipped.",
        "+experiment=tiny", ("trainer", "drafter", "objective", "optimizer", "engine", "data", "responses", "features",
                             "target", "confidence", "calibration", "profile", "scheduler", "evaluate", "export",
                             "tracking", "run"), ranks=True),
    "collect_prompts": Script(
        "Collects prompts from any source, cleans them and splits them into training and held-out ones.",
        "+experiment=tiny data.max_prompts=1000", ("data", "target", "run", "tracking"), ("prompts",),
        folder="data_prep"),
    "generate_responses": Script(
        "Lets the target answer the prompts, in process or at any OpenAI-compatible server.",
        "+experiment=qwen3_8b responses=server", ("responses", "target", "data", "run", "tracking"), ("responses",),
        folder="data_prep"),
    "extract_features": Script(
        "Writes the target's hidden states of all answers, compressed, checksummed and resumable.",
        "+experiment=tiny features.codec=int8", ("features", "target", "data", "run", "tracking"), ("features",),
        folder="data_prep", ranks=True),
    "fit_confidence": Script(
        "Refits the confidence head on the drafter's own blocks and keeps the records that calibration reads.",
        _RUN, ("confidence", "calibration", "drafter", "export", "run", "tracking"), ("confidence",)),
    "calibrate": Script(
        "Fits Sequential Temperature Scaling on held-out records, or compares with what an engine recorded.",
        f"{_RUN} records=service.jsonl recalibrate=false", ("calibration", "run", "tracking"), ("calibrate",),
        group="calibration"),
    "profile_throughput": Script(
        "Measures steps per second of target and drafter, in process or at a running server.",
        f"{_RUN} profile.samples_per_cell=64", ("profile", "run", "target", "tracking"), ("profile",)),
    "evaluate_drafter": Script(
        "Decodes benchmarks with the drafter: acceptance length with intervals, speed against plain decoding.",
        f"{_RUN} evaluate.temperatures=[0,1]", ("evaluate", "scheduler", "export", "run", "tracking"), ("evaluate",)),
    "simulate_serving": Script(
        "Simulates serving from the run's profile and acceptance, and recommends how to serve.",
        f"{_RUN} simulate.concurrency=[1,8,32]", ("simulate", "scheduler", "run"), ("simulate",)),
    "export_drafter": Script(
        "Writes what a serving engine loads, and proves it by reloading.",
        f"{_RUN} export.formats=[deepspec,speculators]", ("export", "run", "tracking"), ("export",)),
    "report": Script("Makes one self-contained page with every figure of a run.", _RUN, ("run",), ("report",)),
    "import_drafter": Script(
        "Makes a run of a drafter that was trained elsewhere. No training.",
        "+experiment=qwen3_8b run.name=reference drafter.init_from=DIR", ("drafter", "target", "run"), (),
        "deepspec.stages.import_drafter"),
    "doctor": Script(
        "Finds out why a served drafter accepts less than it does offline. Exit code 4: a fault was found.",
        f"{_RUN} endpoint=http://127.0.0.1:8000", ("doctor", "run"), (), "deepspec.doctor.run", "doctor"),
    "closed_loop": Script(
        "From a drafter in service to its successor: drift, recalibration or training, export, doctor, comparison.",
        f"{_RUN} records=service.jsonl", ("loop", "doctor", "run"), (), "deepspec.stages.closed_loop", "loop"),
    "sweep": Script(
        "Runs the main job for every combination of the values given, each under a launcher of its own.",
        "-m +experiment=tiny drafter.block_size=4,8,16", ("sweep", "run"), ()),
}


def console_name(name: str) -> str:
    """``deepspec-collect-prompts`` of ``collect_prompts``; the main job is ``deepspec-train``."""
    return PREFIX + ("train" if name == "train_drafter" else name.replace("_", "-"))


def script_name(command: str) -> Optional[str]:
    """The script that ``command`` (a console command, or a script's own name) means; None if there is none."""
    names = {console_name(name): name for name in SCRIPTS} | {name: name for name in SCRIPTS}
    return names.get(command)


def as_commands(text: str) -> str:
    """``text`` with console commands where it names scripts of the repository, for those who have no repository."""
    return _SCRIPT.sub(lambda found: console_name(found[1]) if found[1] in SCRIPTS else found[0], text)
