"""How much noise the difference of two drafters has, counted and computed: the same prompts, other random numbers.

    OMP_NUM_THREADS=1 python benchmarks/estimator_noise.py runs/dspark runs/eagle3 8 77

For every seed (8 here) both drafters decode the same held-out prompts (77 here), the target alone answers them, and
acceptance is computed along those answers (``analytic``) and along drafts at fixed anchors of the held-out responses
(``drafted``). Prints one JSON line: ``sd``, the standard deviation over the seeds of the paired difference (prompts are
the same: what is left is the noise of coins, drafts and texts), ``narrower``, by how much that of a computed difference
is smaller than the counted one's, ``width``, the mean width of the 95 % interval over prompts, ``width_narrower``, and
``target_tokens``, how many tokens the target computed for both drafters together.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.cli import with_stored_overrides
from deepspec.config.compose import compose_config
from deepspec.config.paths import responses_dir
from deepspec.config.schema import Config
from deepspec.data.samples import load_samples
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.evaluation.answers import Answer, answer_values, continued
from deepspec.evaluation.drafted import drafted_values
from deepspec.evaluation.metrics import AcceptanceCounts, acceptance_length
from deepspec.evaluation.paired import compare
from deepspec.stages.confidence_prompts import held_out_requests
from deepspec.targets.sampling import Sampling
from deepspec.training.session import RunSession, load_run

TOKENS, BATCH, ANCHORS = 64, 32, 8
Pair = tuple[AcceptanceCounts, AcceptanceCounts]


def counted(runs: list[RunSession], requests: list[Any], seed: int) -> tuple[Pair, int]:
    """Both drafters' rounds on the same prompts."""
    found, tokens = [], 0
    for run in runs:
        decoder = SpeculativeDecoder(runs[0].target, run.drafter, Sampling(seed=seed), batch_size=BATCH,
                                     max_new_tokens=TOKENS, mode="fixed")
        results = list(decoder.decode(requests))
        tokens += sum(len(item.prompt_ids) for item in requests)
        tokens += sum(1 + record.verified for item in results for record in item.rounds)
        found.append(AcceptanceCounts.of(results, run.drafter.shape.draft_length))
    return (found[0], found[1]), tokens


def along_answers(runs: list[RunSession], requests: list[Any], seed: int) -> tuple[Pair, int]:
    """Both drafters along the same answers of the target."""
    target, sampling = runs[0].target, Sampling(seed=seed)
    decoder = SpeculativeDecoder(target, None, sampling, batch_size=BATCH, max_new_tokens=TOKENS, mode="none")
    prompts = {item.id: item.prompt_ids for item in requests}
    cut = [Answer(item.id, item.domain, prompts[item.id], item.token_ids, item.finish_reason == "stop")
           for item in decoder.decode(requests)]
    length = max(run.drafter.shape.draft_length for run in runs)
    answers = continued(target, cut, sampling, length=length, batch_size=BATCH)
    tokens = sum(3 * len(item.token_ids) + 3 * len(item.prompt_ids) for item in answers)  # drawn, read for each drafter
    found = [answer_values(target, run.drafter, answers, sampling).counts() for run in runs]
    return (found[0], found[1]), tokens


def at_anchors(runs: list[RunSession], config: Config, seed: int, limit: int) -> tuple[Pair, int]:
    """Both drafters' drafts from the same anchors."""
    target = runs[0].target
    found = load_samples(responses_dir(config), "held_out", config.data.max_length, vocab_size=target.spec.vocab_size,
                         mask_token_id=config.target.mask_token_id)
    samples = [found[place] for place in range(min(limit, len(found)))]
    parts = [drafted_values(target, run.drafter, samples, Sampling(seed=seed), num_anchors=ANCHORS, batch_size=BATCH)
             for run in runs]
    tokens = sum(2 * sum(len(item.input_ids) for item in samples) + len(part) * part.rate.shape[1] for part in parts)
    return (parts[0].counts(), parts[1].counts()), tokens


def main(arguments: list[str]) -> None:
    """Two run directories, the number of seeds and of prompts."""
    seeds, limit = int(arguments[2]), int(arguments[3])
    configs = [compose_config(with_stored_overrides([f"run.dir={name}"])) for name in arguments[:2]]
    runs = [load_run(config) for config in configs]
    requests = held_out_requests(configs[0], limit)
    found: dict[str, list[tuple[Pair, int]]] = {"sampled": [], "analytic": [], "drafted": []}
    for seed in range(seeds):
        found["sampled"].append(counted(runs, requests, seed))
        found["analytic"].append(along_answers(runs, requests, seed))
        found["drafted"].append(at_anchors(runs, configs[0], seed, limit))
    measured: dict[str, dict[str, float]] = {}
    for name, parts in found.items():
        differences = [(acceptance_length(one) or 0.0) - (acceptance_length(two) or 0.0) for (one, two), _ in parts]
        widths = [float(np.diff(compare(one, two, 1000).interval)[0]) for (one, two), _ in parts]
        measured[name] = {"difference": float(np.mean(differences)), "sd": float(np.std(differences, ddof=1)),
                          "width": float(np.mean(widths)), "target_tokens": parts[0][1]}
    for values in measured.values():
        values["narrower"] = measured["sampled"]["sd"] / values["sd"] if values["sd"] else float("inf")
        values["width_narrower"] = measured["sampled"]["width"] / values["width"]
    rounded = {name: {key: round(value, 5) for key, value in values.items()} for name, values in measured.items()}
    sys.stdout.write(json.dumps({"benchmark": Path(__file__).stem, "runs": [config.drafter.algorithm for config in
                                                                            configs],
                                 "prompts": len(requests), "seeds": seeds, "measured": rounded}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
