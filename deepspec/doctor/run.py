"""The job ``launch/doctor.py``: examine a server against the run that trained its drafter.

Exit code 0 when it is healthy, 4 when a fault was found; what was found is in ``doctor/doctor.json`` of the run.
"""

import logging
import sys
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from deepspec.artifacts import atomic_write_json
from deepspec.calibration import Fold
from deepspec.calibration.head import load_confidence
from deepspec.config.paths import run_dir, served_folder
from deepspec.config.schema import Config
from deepspec.data.rendering import Renderer
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.doctor.diagnosis import Diagnosis, diagnose, is_short, replace_offline
from deepspec.doctor.endpoint import Engine, connect
from deepspec.doctor.exam import Exam, examine
from deepspec.doctor.files import check_config, check_weights, folder_values
from deepspec.doctor.findings import FAULT, Finding
from deepspec.doctor.reference import Prompt, read_prompts
from deepspec.doctor.rendering import check_rendering
from deepspec.doctor.report import document, paragraph, table
from deepspec.doctor.trials import settle
from deepspec.doctor.variants import rebuild
from deepspec.doctor.weights import check_quantization
from deepspec.drafters.config import shape_from_config
from deepspec.drafters.layouts import deepspec_values, layout_of
from deepspec.drafters.vocabulary import stored_ids, widened
from deepspec.errors import InputRefused
from deepspec.export.config_file import serving_shape
from deepspec.export.fold import KEY, fold_head
from deepspec.export.tensors import DTYPES, collect, read
from deepspec.targets.sampling import Sampling
from deepspec.training.checkpoint import load_drafter
from deepspec.training.learned import quantization_of
from deepspec.training.session import RunSession, load_run

log = logging.getLogger(__name__)
FAULT_FOUND = 4
REPORT = "doctor.json"


def _folded(run: Path, session: RunSession, fold: Mapping[str, float]) -> Any:
    """The run's drafter as an export with the calibration in its weights has it: folded before any rounding."""
    drafter = load_drafter(session.checkpoint, session.shared, session.weights)
    load_confidence(run, drafter, session.drafter_sha256)
    fold_head(drafter, Fold(fold["temperature"], fold["shift"]))
    return drafter


def inspect_folder(folder: Path, run: Path, session: RunSession) -> tuple[list[Finding], Optional[Any]]:
    """Findings of the served folder's files, and the drafter they describe where that is another than that of ``run``
    (its directory)."""
    shape = serving_shape(session.drafter.shape)
    config, dtype = folder_values(folder)
    findings = check_config(config, shape, folder)
    drafter = session.drafter if KEY not in config else _folded(run, session, config[KEY])
    weights = collect(drafter, shape, session.shared, DTYPES[dtype or "float32"])
    findings += check_weights(folder, weights, kind=layout_of(config))
    if not any(item.kind == FAULT for item in findings):
        return findings, None
    try:
        stored = read(folder)
        ids = stored_ids(stored, folder)
        found = shape_from_config(deepspec_values(config, target_layers=shape.num_target_layers), ids)
        stored = stored if ids is None else widened(stored, ids, found.vocab_size)
        served = rebuild(session.drafter, found, embed=stored.get("embed_tokens.weight"),
                         lm_head=stored.get("lm_head.weight"), tensors=stored)
    except (InputRefused, KeyError, ValueError, RuntimeError) as error:
        log.info("the served folder cannot be run here as it is: %s", error)
        return findings, None
    return findings, served


def sampled_length(session: RunSession, prompts: list[Prompt], tokens: int) -> Optional[float]:
    """Acceptance length of our decoder on ``prompts`` at temperature 1."""
    decoder = SpeculativeDecoder(session.target, session.drafter, Sampling(temperature=1.0), batch_size=len(prompts),
                                 max_new_tokens=tokens, ignore_eos=True)
    requests = [DecodeRequest(str(number), prompt.ids) for number, prompt in enumerate(prompts)]
    rounds = [record for result in decoder.decode(requests) for record in result.rounds]
    return 1 + sum(record.accepted for record in rounds) / len(rounds) if rounds else None


def examine_server(config: Config, session: RunSession, engine: Engine) -> tuple[Exam, Diagnosis]:
    """The whole examination of one server."""
    options = config.doctor
    renderer = Renderer(session.target.tokenizer, config.target.thinking, config.target.name)
    room = session.drafter.shape.draft_length + 2
    longest = None if engine.facts.max_length is None else engine.facts.max_length - room
    prompts = read_prompts(config, renderer, longest)
    rendering = check_rendering(engine, prompts, renderer.template_kwargs, session.target.tokenizer)
    files, served = inspect_folder(served_folder(config), run_dir(config), session)
    files += check_quantization(engine.facts, quantization_of(config, session.target.spec).features)
    differences = "; ".join(item.says for item in files if item.kind == FAULT)
    exam = examine(engine, session.target, session.drafter, prompts, options.max_new_tokens, served=served,
                   differences=differences)
    if exam.silent is None and is_short(replace_offline(exam), options.tolerance, options.certainty):
        exam = settle(engine, session.target, exam, options.certainty)
    sampled = None
    if exam.traffic is not None and exam.traffic.rounds:
        sampled = sampled_length(session, prompts, options.max_new_tokens)
    return exam, diagnose(exam, files, rendering.findings, trained=session.drafter.shape.draft_length,
                          tolerance=options.tolerance, certainty=options.certainty, sampled=sampled)


def run(config: Config, overrides: Sequence[str] = ()) -> int:
    """Examine ``doctor.endpoint`` and write the report. Returns the exit code."""
    engine = connect(config.doctor)
    log.info("%s %s serves %s", engine.facts.engine, engine.facts.version or "", engine.facts.model)
    session = load_run(config)
    load_confidence(run_dir(config), session.drafter, session.drafter_sha256)
    exam, diagnosis = examine_server(config, session, engine)
    settings = {"prompts": config.doctor.prompts, "max_new_tokens": config.doctor.max_new_tokens, "temperature": 0.0,
                "tolerance": config.doctor.tolerance, "certainty": config.doctor.certainty}
    where = run_dir(config) / "doctor" / REPORT
    atomic_write_json(where, document(diagnosis, exam, engine.facts, str(served_folder(config)),
                                      session.drafter_sha256, settings))
    for line in table(diagnosis, exam):
        log.info("%s", line)
    sys.stdout.write(f"\n{paragraph(diagnosis, exam)}\n\n{where}\n")
    return 0 if diagnosis.healthy else FAULT_FOUND
