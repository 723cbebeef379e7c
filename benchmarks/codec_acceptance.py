"""What a codec of the feature store costs in acceptance: drafters trained on its features against those of bfloat16.

    PYTHONPATH=. python benchmarks/codec_acceptance.py directory=DIR [name=value ...] [option=value ...]

Names: directory (runs and results; a second call goes on where the first stopped), data_root (prompts, responses and
features; default: in directory), experiment, codecs (comma-separated, compared with the reference bf16), seeds, steps
(of each training; 0: as the experiment says), anchors, estimator (teacher_forced: products of 1 - L1/2 along the
held-out responses; drafted: along the drafter's own drafts), batch (texts evaluated side by side), minutes (0: no
limit; else the call stops training in time, saves, and says what is left). Anything else is an option of the project,
for all parts of the measurement (data.max_prompts=600, say).

All drafters learn from the same responses in the same order; drafters of one seed differ in the features alone. All
are evaluated on the target's own hidden states, never on stored ones, at the same anchors with the same random numbers.

Prints one JSON line per codec: ``delta`` = acceptance length with the codec - with bf16, mean over seeds, ``ci95`` =
percentile bootstrap over conversations (the same draws for all drafters) and seeds, ``deltas`` by seed, and
``of_plain`` = stored bytes per token / ((layers + 1) * width * 2).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deepspec import artifacts  # noqa: E402
from deepspec.config.compose import compose_config  # noqa: E402
from deepspec.config.paths import features_dir, model_cache, responses_dir  # noqa: E402
from deepspec.config.schema import Config  # noqa: E402
from deepspec.data.batch import Sample  # noqa: E402
from deepspec.data.samples import load_samples  # noqa: E402
from deepspec.data.sources import encode_samples  # noqa: E402
from deepspec.evaluation.answers import teacher_forced_values  # noqa: E402
from deepspec.evaluation.bootstrap import resample_weights  # noqa: E402
from deepspec.evaluation.drafted import anchors_per_sample, drafted_values  # noqa: E402
from deepspec.targets.load import load_target  # noqa: E402
from deepspec.targets.sampling import Sampling  # noqa: E402
from deepspec.training import checkpoint  # noqa: E402
from deepspec.training.session import shared_weights  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "bf16"
DEFAULTS: dict[str, Any] = {
    "directory": "", "data_root": "", "experiment": "smollm2_135m", "codecs": "int8,fp8-e4m3", "seeds": "0,1,2",
    "steps": 0, "anchors": 20000, "estimator": "teacher_forced", "batch": 16, "minutes": 0.0,
}
RESAMPLES = 10000


class OutOfTime(Exception):
    """The call's minutes are over; what is done is kept."""


class Measurement:
    """Names, paths and parts of one measurement."""

    def __init__(self, options: dict, overrides: list[str]) -> None:
        self.options, self.directory = options, Path(options["directory"])
        self.codecs = [REFERENCE] + [codec for codec in options["codecs"].split(",") if codec != REFERENCE]
        self.seeds = [int(seed) for seed in options["seeds"].split(",")]
        root = options["data_root"] or str(self.directory / "data")
        self.overrides = [f"+experiment={options['experiment']}", *overrides, f"run.data_root={root}",
                          "tracking.mode=disabled"]
        self.deadline = time.monotonic() + 60 * options["minutes"] if options["minutes"] else float("inf")

    def run(self, codec: str, seed: int) -> Path:
        return self.directory / f"{codec}-{seed}"

    def config(self, codec: str) -> Config:
        return compose_config([*self.overrides, f"features.codec={codec}"])

    def job(self, *arguments: str) -> None:
        """The project's own main job. Raises OutOfTime after it has saved, where it may not go on."""
        command = [sys.executable, str(ROOT / "launch" / "train_drafter.py"), *self.overrides, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
        left = self.deadline - time.monotonic()
        try:
            code = process.wait(None if left == float("inf") else max(left, 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise OutOfTime from None
        if code:
            sys.exit(f"{' '.join(command)} ended with {code}")

    def prepare(self) -> None:
        """Responses once, a feature store per codec."""
        for codec in self.codecs:
            if not artifacts.is_complete(features_dir(self.config(codec))):
                self.job(f"features.codec={codec}", "stages=[prompts,responses,features]",
                         f"run.dir={self.directory / 'data-jobs'}")

    def train(self, codec: str, seed: int) -> None:
        """One drafter; a finished training says so and ends at once, so a marker saves the start."""
        done = self.run(codec, seed) / "trained"
        if done.is_file():
            return
        steps = [f"trainer.max_steps={self.options['steps']}"] if self.options["steps"] else []
        self.job(f"features.path={features_dir(self.config(codec))}", f"run.seed={seed}", "stages=[train]",
                 f"run.dir={self.run(codec, seed)}", "trainer.validate_every=0", *steps)
        done.write_text("")


def evaluated(measurement: Measurement, samples: list[Sample], config: Config) -> dict:
    """Per conversation [P] the sum of lengths and the number of anchors, of every drafter; kept beside its weights."""
    options, target, found = measurement.options, None, {}
    each = anchors_per_sample(samples, options["anchors"])
    for codec in measurement.codecs:
        for seed in measurement.seeds:
            run = measurement.run(codec, seed)
            name = checkpoint.latest(run)
            kept = run / (f"values-{options['estimator']}-" + artifacts.canonical_hash(
                [checkpoint.drafter_sha256(name), each, [item.sample_id for item in samples]], 12) + ".npz")
            if not kept.is_file():
                if time.monotonic() > measurement.deadline:
                    raise OutOfTime
                target = target or load_target(config.target, device="cpu", cache_dir=model_cache(config))
                drafter = checkpoint.load_drafter(name, shared_weights(target))
                drafter.to(target.dtype).requires_grad_(False)
                if options["estimator"] == "drafted":
                    values = drafted_values(target, drafter, samples, Sampling(), num_anchors=each,
                                            batch_size=options["batch"])
                else:
                    states = (encode_samples(target, [item])[0] for item in samples)
                    values = teacher_forced_values(target, drafter, states, Sampling(), num_anchors=each, seed=0)
                counts = values.counts()
                np.savez(kept, prompts=counts.prompts, tokens=counts.tokens, rounds=counts.rounds)
            with np.load(kept) as stored:
                found[codec, seed] = dict(stored)
    return found


def compared(measurement: Measurement, found: dict, codec: str) -> dict:
    """Acceptance lengths of a codec and the reference, and their difference with its interval."""
    def tau(one: str, seed: int, weights: Optional[np.ndarray] = None) -> np.ndarray:
        values = found[one, seed]
        weights = np.ones((1, len(values["rounds"]))) if weights is None else weights
        return weights @ values["tokens"] / (weights @ values["rounds"])

    draws = resample_weights(len(found[codec, measurement.seeds[0]]["rounds"]), RESAMPLES, 0)
    resampled = np.stack([tau(codec, seed, draws) - tau(REFERENCE, seed, draws) for seed in measurement.seeds])
    chosen = np.random.default_rng(1).integers(0, len(measurement.seeds), (len(measurement.seeds), RESAMPLES))
    means = np.take_along_axis(resampled, chosen, axis=0).mean(axis=0)
    deltas = [float(tau(codec, seed)[0] - tau(REFERENCE, seed)[0]) for seed in measurement.seeds]
    return {
        "acceptance_length": round(float(np.mean([tau(codec, seed)[0] for seed in measurement.seeds])), 4),
        "reference": round(float(np.mean([tau(REFERENCE, seed)[0] for seed in measurement.seeds])), 4),
        "delta": round(float(np.mean(deltas)), 5),
        "ci95": [round(float(bound), 5) for bound in np.percentile(means, (2.5, 97.5))],
        "deltas": [round(value, 5) for value in deltas],
    }


def stored(config: Config) -> dict:
    """Bytes per token of a store, and the share of two bytes per value of all layers and the last hidden state."""
    manifest = artifacts.read_manifest(features_dir(config))
    assert manifest is not None
    facts, header = manifest.facts, manifest.facts["header"]
    plain = (len(header["layers"]) + 1) * header["hidden_size"] * 2
    return {"bytes_per_token": round(facts["bytes"] / facts["tokens"], 1),
            "of_plain": round(facts["bytes"] / facts["tokens"] / plain, 4)}


def main(arguments: list[str]) -> None:
    options, overrides = dict(DEFAULTS), []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in DEFAULTS:
            options[name] = type(DEFAULTS[name])(value)
        else:
            overrides.append(argument)
    if not options["directory"] or options["estimator"] not in ("teacher_forced", "drafted"):
        sys.exit(__doc__)
    measurement = Measurement(options, overrides)
    config = measurement.config(REFERENCE)
    try:
        measurement.prepare()
        for seed in measurement.seeds:
            for codec in measurement.codecs:
                measurement.train(codec, seed)
        samples = list(load_samples(responses_dir(config), "held_out", config.data.max_length))
        with torch.no_grad():
            found = evaluated(measurement, samples, config)
    except OutOfTime:
        print("out of time: what is done is kept; the same command goes on", file=sys.stderr)
        sys.exit(75)
    anchors = int(next(iter(found.values()))["rounds"].sum())
    for codec in measurement.codecs[1:]:
        print(json.dumps({
            "benchmark": "codec_acceptance", "codec": codec, **compared(measurement, found, codec),
            **stored(measurement.config(codec)), "experiment": options["experiment"], "estimator": options["estimator"],
            "anchors": anchors, "conversations": len(next(iter(found.values()))["rounds"]), "seeds": measurement.seeds,
            "steps": checkpoint.read_state(checkpoint.latest(measurement.run(codec, measurement.seeds[0]))).step,
            "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
