"""Real decoding with the weights of an engine, whatever its ZeRO stage."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "decoding"))

from tiny import prompts, tiny_drafter, tiny_target  # noqa: E402
from tiny_training import tiny_config  # noqa: E402

from deepspec.decoding.decoder import SpeculativeDecoder  # noqa: E402
from deepspec.decoding.types import DecodeRequest  # noqa: E402
from deepspec.evaluation.metrics import AcceptanceCounts, acceptance_length  # noqa: E402
from deepspec.targets.sampling import Sampling  # noqa: E402
from deepspec.training.engine import initialize  # noqa: E402
from deepspec.training.live_decode import _SEED_OFFSET, LiveDecoder  # noqa: E402
from deepspec.training.module import TrainingModule  # noqa: E402


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def live(target, drafter, requests) -> LiveDecoder:
    return LiveDecoder(target, drafter.shape, drafter.shared, tuple(requests), every=5, max_new_tokens=12, seed=4)


def engine_of(drafter, tmp_path, stage: int):
    config = tiny_config(tmp_path, micro_batch_size=1, global_batch_size=1)
    config.engine.zero_stage = stage
    return initialize(TrainingModule(drafter.requires_grad_(True), config.objective), config.trainer, config.optimizer,
                      config.engine)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_decodes_as_the_plain_drafter_does(target, tmp_path, stage):
    plain, requests = tiny_drafter(target), prompts(6)
    decoder = SpeculativeDecoder(target, plain, Sampling(temperature=1.0, seed=4 + _SEED_OFFSET), batch_size=16,
                                 max_new_tokens=12)
    counts = AcceptanceCounts.of(list(decoder.decode(requests)), plain.shape.draft_length)
    engine = engine_of(tiny_drafter(target), tmp_path, stage)
    before = torch.get_rng_state()
    row = live(target, plain, requests)(engine, 5)
    assert torch.equal(before, torch.get_rng_state()), "decoding must not move training's random numbers"
    assert engine.training
    assert row["rounds"] == counts.rounds.sum() > 6 and row["num_prompts"] == 6
    assert row["acceptance_length"] == acceptance_length(counts)
    assert row["accepted_per_position"] == counts.survived.sum(axis=0).tolist()
    assert sum(part["rounds"] for part in row["domains"].values()) == row["rounds"]
    assert list(row["domains"]) == ["chat", "math"]


def test_uses_the_weights_of_the_moment(target, tmp_path):
    drafter = tiny_drafter(target)
    engine = engine_of(drafter, tmp_path, 1)
    decode = live(target, drafter, prompts(4))
    first = decode(engine, 5)
    assert decode(engine, 10) == first
    with torch.no_grad():
        for parameter in decode._drafter.parameters():  # what the last call left behind must not matter
            parameter.zero_()
    assert decode(engine, 15) == first
    from deepspec.training.state import each_weight, scatter

    scatter(engine, {"weights": {name: -weight.clone() for name, weight in each_weight(engine)}})
    assert decode(engine, 20) != first


def test_due_and_numbers_without_rounds(target, tmp_path):
    drafter = tiny_drafter(target)
    decode = live(target, drafter, [DecodeRequest("a", (3, 4), "math")])
    decode.max_new_tokens = 1  # the prefill yields the only token: no round
    assert [step for step in range(1, 12) if decode.due(step)] == [5, 10]
    row = decode(engine_of(drafter, tmp_path, 0), 5)
    assert row["rounds"] == 0 and row["acceptance_length"] is None
    assert row["conditional_acceptance"] == [None] * drafter.shape.draft_length
