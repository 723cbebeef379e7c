"""A trained drafter in real vLLM accepts what our decoder accepts on the same prompts, greedy, in float32.

Needs DEEPSPEC_VLLM_PYTHON and DEEPSPEC_RUN, the directory of a finished run of ``+experiment=tiny``.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm import PYTHON, serve, speculative_config

from deepspec.config.compose import compose_config
from deepspec.config.paths import model_cache, responses_dir
from deepspec.data.responses import read_responses
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.decoding.types import DecodeRequest
from deepspec.export.load import load_exported
from deepspec.targets.load import load_target, locate
from deepspec.targets.sampling import Sampling

RUN = os.environ.get("DEEPSPEC_RUN")
pytestmark = pytest.mark.skipif(
    not PYTHON or not RUN, reason="needs DEEPSPEC_VLLM_PYTHON and DEEPSPEC_RUN (a finished run of +experiment=tiny)")
TOKENS = 32
PROMPTS = 12


def ours(target: Any, export: Path, prompts: list[list[int]]) -> tuple[int, int, list[list[int]]]:
    """Rounds, accepted drafts and answers of our decoder, the end-of-turn token ignored."""
    drafter, _ = load_exported(export)
    decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=0.0), batch_size=PROMPTS, max_new_tokens=TOKENS)
    decoder._stop_ids = frozenset()
    requests = [DecodeRequest(str(number), tuple(prompt)) for number, prompt in enumerate(prompts)]
    results = sorted(decoder.decode(requests), key=lambda result: int(result.id))
    rounds = [item for result in results for item in result.rounds]
    return len(rounds), sum(item.accepted for item in rounds), [list(result.token_ids) for result in results]


def test_acceptance_length_equals_ours() -> None:
    config = compose_config(["+experiment=tiny"])
    target = load_target(config.target, device=torch.device("cpu"), cache_dir=model_cache(config))
    rows = itertools.islice(read_responses(responses_dir(config), "held_out"), PROMPTS)
    prompts = [list(row.turns[0].prompt_ids) for row in rows]
    export = Path(str(RUN)) / "export"
    rounds, accepted, answers = ours(target, export, prompts)
    report = serve({
        "target": str(locate(config.target, model_cache(config)).resolve()), "prompts": prompts, "max_tokens": TOKENS,
        "speculative_config": speculative_config(export), "max_model_len": 512, "alone": True,
    }, timeout=1800)
    served, mine = 1 + report["accepted"] / report["rounds"], 1 + accepted / rounds
    print(f"acceptance length: vLLM {served:.4f} ({report['rounds']} rounds), ours {mine:.4f} ({rounds} rounds)")
    assert report["greedy_equal"], report
    assert [row[:TOKENS] for row in report["tokens"]] == [row[:TOKENS] for row in answers]
    assert abs(served - mine) <= 0.02
