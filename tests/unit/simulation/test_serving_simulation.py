"""The simulated engine against sums done by hand, against the real decoder, and what it recommends."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest

from deepspec.calibration import ConfidenceRecords, RecordsOrigin
from deepspec.config.schema import SchedulerConfig, SimulateConfig
from deepspec.decoding.cost import ProfileCell
from deepspec.decoding.decoder import SpeculativeDecoder
from deepspec.errors import InputRefused
from deepspec.profiling.extras import PrefillCell
from deepspec.simulation.costs import StepCosts, check_same_machine
from deepspec.simulation.engine import Limits, Outcome, simulate
from deepspec.simulation.policies import Policy
from deepspec.simulation.recommend import recommend
from deepspec.simulation.subjects import Subject, read_profile_header
from deepspec.simulation.sweep import sweep
from deepspec.simulation.traces import Traces, traces_from_records, traces_of
from deepspec.simulation.workload import SimulatedRequest, Workload, domain_weights, draw, requests_of
from deepspec.targets.sampling import Sampling
from tests.unit.decoding.tiny import prompts, tiny_drafter, tiny_target


def costs(base: float = 8.0, per_token: float = 1.0, draft: float = 2.0, per_request: float = 0.0,
          depths: tuple[int, ...] = (64,), deep: float = 1.0) -> StepCosts:
    """ms: ``base + per_request R + per_token B``, times ``deep`` at the second depth; prompts 1 ms + 0.1 per token."""
    cells = []
    for place, depth in enumerate(depths):
        scale = deep if place else 1.0
        for requests in (1, 4, 16):
            for tokens in (1, 3, 5):
                verify = scale * (base + per_request * requests + per_token * requests * tokens)
                cells.append(ProfileCell(requests, tokens, depth, 5, 0.0, verify + draft, 0.0, draft, verify, 0.0))
    alone = [{"num_reqs": count, "p50_ms": base + (per_token + per_request) * count} for count in (1, 4, 16)]
    return StepCosts.from_cells(cells, {"alone": alone, "prefill": [PrefillCell(10, 5, 2.0, 2.0),
                                                                    PrefillCell(110, 5, 12.0, 12.0)]})


def traces(accepted: list[list[int]], answer: int = 100, prompt: int = 10, length: int = 4,
           domains: Optional[list[str]] = None, logits: Any = None) -> Traces:
    flat = np.array([value for part in accepted for value in part])
    return Traces(length, flat, np.full(len(flat), length), np.concatenate(([0], np.cumsum(list(map(len, accepted))))),
                  np.array(domains or ["chat"] * len(accepted)), np.full(len(accepted), prompt),
                  np.full(len(accepted), answer), logits)


def serve(found: Traces, priced: StepCosts, policy: Policy, users: int = 1, count: int = 1, **limits: Any) -> Outcome:
    requests = requests_of(found, [index % len(found) for index in range(count)], [0.0] * count)
    return simulate(found, priced, policy, Limits(users, **limits), requests)


def test_plain_decoding_is_a_prompt_and_a_round_per_token() -> None:
    outcome = serve(traces([[0]]), costs(), Policy("none"))
    assert outcome.tokens == 100 and outcome.steps == 100
    assert outcome.seconds == pytest.approx((2.0 + 99 * 9.0) / 1e3)


def test_fixed_lengths_pay_for_all_tokens_and_keep_the_accepted() -> None:
    outcome = serve(traces([[3, 0]], answer=1 + 4 + 1 + 4 + 1), costs(), Policy("fixed", 4))
    assert outcome.tokens == 11 and outcome.rounds == 4
    assert outcome.seconds == pytest.approx((2.0 + 4 * (2.0 + 8.0 + 5.0)) / 1e3)
    shorter = serve(traces([[3, 0]], answer=1 + 3 + 1 + 3 + 1), costs(), Policy("fixed", 2))
    assert shorter.rounds == 4 and shorter.seconds == pytest.approx((2.0 + 4 * (2.0 + 8.0 + 3.0)) / 1e3)


def test_rows_share_a_step_and_prompts_are_added_to_it() -> None:
    outcome = serve(traces([[0]], answer=2), costs(), Policy("none"), users=1, count=2)
    assert outcome.seconds == pytest.approx(2 * (2.0 + 9.0) / 1e3)
    together = serve(traces([[0]], answer=2), costs(), Policy("none"), users=2, count=2)
    assert together.seconds == pytest.approx((3.0 + 10.0) / 1e3)  # 20 prompt tokens at once, then one round of two


def test_a_long_prompt_is_fed_in_parts_and_decoding_rows_go_on() -> None:
    found = traces([[0], [0]], answer=3)
    found = replace(found, prompt_tokens=np.array([10, 50]))
    outcome = serve(found, costs(), Policy("none"), users=2, count=2, prefill_tokens=20)
    # 10 + 10, 20, 20 prompt tokens; the first request decodes meanwhile.
    assert outcome.prefill_tokens == 60 and outcome.steps == 5
    assert [row.finished for row in outcome.finished] == sorted(row.finished for row in outcome.finished)


def test_limits_of_cache_and_rows_make_requests_wait() -> None:
    found = traces([[0]], answer=10)
    free = serve(found, costs(), Policy("none"), users=8, count=8)
    narrow = serve(found, costs(), Policy("none"), users=8, count=8, kv_tokens=40)  # two of 20 tokens
    assert free.largest_batch == 8 and narrow.largest_batch == 2 and narrow.seconds > free.seconds
    with pytest.raises(InputRefused, match="kv_tokens=19"):
        serve(found, costs(), Policy("none"), users=8, count=1, kv_tokens=19)


def test_arrivals_are_waited_for() -> None:
    found = traces([[0]], answer=2)
    requests = requests_of(found, [0, 0], [0.0, 5.0])
    outcome = simulate(found, costs(), Policy("none"), Limits(4), requests)
    assert outcome.seconds == pytest.approx(5.0 + 0.011)
    assert outcome.finished[1].admitted == 5.0 and outcome.finished[1].first_token == pytest.approx(5.002)


def test_longer_contexts_cost_more_when_they_were_profiled() -> None:
    deep = costs(depths=(16, 1016), deep=3.0)
    assert deep.verify_seconds(1, 1, 16) == pytest.approx(9e-3)
    assert deep.verify_seconds(1, 1, 516) == pytest.approx(18e-3)
    assert deep.verify_seconds(1, 1, 5000) == pytest.approx(27e-3)


def test_plain_rounds_get_dearer_with_the_context_too() -> None:
    deep = costs(depths=(64, 128), deep=2.0)
    assert deep.alone_round(1, 64.0) == pytest.approx(9e-3) and deep.alone_round(1, 128.0) == pytest.approx(18e-3)
    assert deep.alone_round(4, 96.0) == pytest.approx((12.0 + 6.0) / 1e3)
    outcome = serve(traces([[0]], prompt=128, answer=2), deep, Policy("none"))
    assert outcome.seconds == pytest.approx((1.0 + 12.8 + 18.0) / 1e3)


def test_our_own_decoder_pays_for_the_longest_context_and_engines_with_pages_for_the_mean() -> None:
    deep = costs(depths=(64, 128), deep=2.0)
    assert replace(deep, padded=True).context([64, 64, 128]) == 128.0
    assert deep.context([64, 64, 128]) == pytest.approx(256 / 3)


def test_domain_mix_is_met_exactly_and_unknown_domains_are_refused() -> None:
    found = traces([[0]] * 6, domains=["math"] * 3 + ["code"] * 3)
    rows = draw(found, Workload(40, 4, None, {"math": 3.0, "code": 1.0}), np.random.default_rng(0))
    assert sum(found.domains[row.trace] == "math" for row in rows) == 30
    assert domain_weights(found, {}) == {"code": 0.5, "math": 0.5}
    with pytest.raises(InputRefused, match="poetry"):
        domain_weights(found, {"poetry": 1.0})


def test_a_rate_gives_poisson_arrivals() -> None:
    rows = draw(traces([[0]]), Workload(4000, 4, 50.0), np.random.default_rng(0))
    gaps = np.diff([row.arrival for row in rows])
    assert gaps.mean() == pytest.approx(0.02, rel=0.06) and gaps.std() == pytest.approx(0.02, rel=0.08)


def test_the_scheduler_stops_drafting_when_it_does_not_pay() -> None:
    bad = traces([[0] * 40], answer=300, logits=np.full((40, 4), -4.0, dtype=np.float32))
    good = traces([[4] * 40], answer=300, logits=np.full((40, 4), 6.0, dtype=np.float32))
    dear = costs(base=1.0, per_token=4.0, draft=6.0)
    for found, drafts in ((bad, False), (good, True)):
        subject = Subject("x", found, dear if not drafts else costs())
        outcome = serve(found, subject.costs, subject.policy("scheduled", SchedulerConfig()))
        assert (outcome.draft_steps > 0.9 * outcome.steps) is drafts
        assert (outcome.draft_steps < 0.1 * outcome.steps) is not drafts


def test_a_close_call_is_settled_by_the_clock_of_the_simulation_and_not_tried_for_ever() -> None:
    """Drafting gains a tenth here: the first rounds try plain decoding, later ones only at the rate of trials."""
    found = traces([[1] * 400], answer=800, logits=np.full((400, 4), 0.0, dtype=np.float32))
    subject = Subject("x", found, costs(base=8.0, per_token=0.2, draft=6.0))
    outcome = serve(found, subject.costs, subject.policy("scheduled", SchedulerConfig()))
    assert 0.9 < outcome.draft_steps / outcome.steps < 1.0


def test_traces_from_records_follow_conversations() -> None:
    origin = RecordsOrigin(2, "d" * 64, 1.0, (1.0, 1.0))
    records = ConfidenceRecords(
        origin, np.zeros((5, 2), dtype=np.float32), np.array([1, 2, 0, 0, 1]), np.full(5, 2),
        np.full((5, 2), 0.5, dtype=np.float32), np.array(["a", "a", "b", "c", "c"]),
        np.array(["math", "math", "code", "math", "math"]))
    found = traces_from_records(records, {"a": 7, "b": 9, "c": 11})
    assert found.starts.tolist() == [0, 2, 3, 5] and found.domains.tolist() == ["math", "code", "math"]
    assert found.prompt_tokens.tolist() == [7, 9, 11] and found.answer_tokens.tolist() == [6, 2, 4]
    assert found.select([2, 0]).accepted.tolist() == [0, 1, 1, 2]


def test_traces_survive_a_file_and_another_drafter_is_refused(tmp_path: Path) -> None:
    found = replace(traces([[1, 2], [3]], logits=np.ones((3, 4), dtype=np.float32)), drafter_sha256="d" * 64)
    found.save(tmp_path / "t.npz")
    loaded = Traces.load(tmp_path / "t.npz", drafter_sha256="d" * 64)
    assert loaded.logits is not None and loaded.starts.tolist() == [0, 2, 3] and loaded.draft_length == 4
    with pytest.raises(InputRefused, match="made with drafter"):
        Traces.load(tmp_path / "t.npz", drafter_sha256="e" * 64)
    with pytest.raises(InputRefused, match="not found"):
        Traces.load(tmp_path / "none.npz")
    (tmp_path / "t.npz").write_bytes(b"PK")
    with pytest.raises(InputRefused, match="not a file of acceptance traces"):
        Traces.load(tmp_path / "t.npz")


@pytest.mark.parametrize("mode", ["none", "fixed"])
@pytest.mark.parametrize("confidence", [True, False])
def test_steps_and_tokens_equal_the_real_decoders(mode: str, confidence: bool) -> None:
    """Same requests, same acceptance: the simulation must take the very steps that decoding takes."""
    target = tiny_target()
    drafter = tiny_drafter(target, **({} if confidence else {"confidence_head": False}))
    requests = prompts(14)

    def run(how: str) -> tuple[Any, Any]:
        decoder = SpeculativeDecoder(target, drafter, Sampling(temperature=0.0), batch_size=4, max_new_tokens=24,
                                     mode=how)
        return list(decoder.decode(requests)), decoder.timings

    recorded, _ = run("fixed")
    known = {result.id: result for result in recorded if any(item.drafted for item in result.rounds)}
    requests = [item for item in requests if item.id in known]
    found = traces_of([known[item.id] for item in requests], 4)
    assert (found.logits is not None) is confidence
    real, timings = run(mode)
    policy = Policy("none") if mode == "none" else Policy("fixed", 4)
    outcome = simulate(found, costs(), policy, Limits(4), requests_of(found, range(len(requests)), [0.0] * 14))
    assert outcome.tokens == timings.tokens == sum(len(result.token_ids) for result in real)
    assert outcome.steps == timings.steps and outcome.draft_steps == timings.draft_steps
    assert outcome.prefill_tokens == sum(len(item.prompt_ids) for item in requests)


def test_recommendations_follow_load_promise_and_depth() -> None:
    random = np.random.default_rng(0)
    blocks = [random.integers(2, 5, 30).tolist() for _ in range(12)]
    better = [random.integers(3, 5, 30).tolist() for _ in range(12)]
    cheap_alone = costs(base=20.0, per_token=0.05, draft=1.0)
    busy = costs(base=1.0, per_token=3.0, draft=3.0)
    config = SimulateConfig(concurrency=[1], requests=12)
    shallow = Subject("shallow", traces(blocks, answer=60), cheap_alone, "dspark", 2)
    deep = Subject("deep", traces(better, answer=60), cheap_alone, "dspark", 5)
    first = recommend([shallow, deep], config, SchedulerConfig())[0]
    assert first.settings["run"] == "deep" and first.layers == 5 and first.point.policy != "none" and first.met
    assert "above no speculation" in first.reason
    plain = recommend([replace(shallow, costs=busy)], replace(config, concurrency=[16]), SchedulerConfig())[0]
    assert plain.point.policy == "none" and plain.layers is None and "earns" in plain.reason
    impossible = recommend([shallow], replace(config, min_tokens_per_second_per_user=1e6), SchedulerConfig())[0]
    assert not impossible.met and "no choice keeps the promise" in impossible.reason


def test_a_promise_to_users_can_cost_throughput() -> None:
    """Plain decoding of many has the throughput, drafting the speed per user: the promise decides."""
    blocks = [[4] * 30 for _ in range(4)]
    subject = Subject("x", traces(blocks, answer=90), costs(base=10.0, per_token=1.2, draft=8.0))
    config = SimulateConfig(concurrency=[1, 16], requests=32)
    points = sweep([subject], replace(config, policies=["none", "fixed"]), SchedulerConfig())
    alone = {point.policy: point for point in points if point.concurrency == 1}
    assert alone["fixed"].tokens_per_second_per_user > alone["none"].tokens_per_second_per_user
    many = {point.policy: point for point in points if point.concurrency == 16}
    assert many["none"].tokens_per_second_per_user < alone["none"].tokens_per_second_per_user
    assert many["none"].tokens_per_second > alone["none"].tokens_per_second
    assert many["fixed"].verify_budget == pytest.approx(5.0, abs=0.01)


def test_profiles_of_other_machines_are_not_mixed() -> None:
    own = {"hardware": "A", "target_sha256": "t", "dtype": "float32"}
    check_same_machine(own, dict(own), "b")
    with pytest.raises(InputRefused, match="hardware='B'"):
        check_same_machine(own, own | {"hardware": "B"}, "b")


def test_request_contexts_count_prompt_and_answer() -> None:
    row = SimulatedRequest(0.0, 0, 10, 5, prefilled=10, generated=3)
    assert row.context == 12 and row.decoding


@pytest.mark.parametrize("change, words", [
    ({"accepted": np.array([9, 0, 0])}, "not counts"), ({"starts": np.array([0, 2, 9])}, "does not divide"),
    ({"known": np.array([4])}, "known has shape"), ({"domains": np.array(["a"])}, "starts has shape"),
    ({"logits": np.full((3, 4), np.nan, dtype=np.float32)}, "not finite"),
    ({"logits": np.zeros((3, 2), dtype=np.float32)}, "logits has shape"),
])
def test_traces_that_do_not_belong_together_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    whole = traces([[4, 0], [2]])
    whole.save(tmp_path / "whole.npz")
    assert Traces.load(tmp_path / "whole.npz").acceptance_length == 3.0
    replace(whole, **change).save(tmp_path / "changed.npz")
    with pytest.raises(InputRefused, match=words):
        Traces.load(tmp_path / "changed.npz")


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_damaged_profile_headers_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "sps.json").write_text(content)
    with pytest.raises(InputRefused, match="launch/profile_throughput.py"):
        read_profile_header(tmp_path)
