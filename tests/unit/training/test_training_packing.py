"""Packing by tokens and blocks: one gradient, packed, padded or one sample at a time, also after a resume."""

import dataclasses
import json
import math

import pytest
import torch
from tiny_training import SHAPE, WIDTH, TinySource, shared_weights, tiny_config, tiny_drafter, tiny_trainer

from deepspec import artifacts, distributed
from deepspec.config.schema import EngineConfig, OptimizerConfig, TrainerConfig
from deepspec.data.feature_format import StoreHeader
from deepspec.data.feature_shards import FeatureWriter, join_index
from deepspec.data.feature_store import FeatureStore
from deepspec.data.sources import CachedFeatures, SampleInfo
from deepspec.errors import InputRefused
from deepspec.training.engine import accumulation_steps, build_config, initialize, named_trainable
from deepspec.training.module import TrainingModule
from deepspec.training.packs import Packer, to_device
from deepspec.training.step import accumulate, prime, total_weights

PACKED = {"pack_tokens": 90, "pack_anchors": 16, "micro_batch_size": 1}
TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes", "wait_share", "forward_share", "backward_share",
         "optimizer_share")


def heads():
    for head, confidence in (("none", True), ("vanilla", True), ("gated", True), ("rnn", True)):
        yield dataclasses.replace(SHAPE, head=head, markov_rank=0 if head == "none" else 8, confidence_head=confidence,
                                  confidence_with_markov=head != "none")


def packer_of(source, tmp_path, shape=SHAPE, **trainer):
    config = tiny_config(tmp_path, **trainer)
    return config, Packer(source, shape, config.trainer, config.objective, seed=config.run.seed)


def plain_gradient(source, tmp_path, shape, dtype, indices, **trainer):
    """Loss and gradient of a window by autograd alone, pack by pack."""
    config, packer = packer_of(source, tmp_path, shape, **trainer)
    drafter = tiny_drafter(shape).to(dtype)
    shared = shared_weights()
    drafter.shared = dataclasses.replace(shared, embed=shared.embed.to(dtype), lm_head=shared.lm_head.to(dtype))
    module = TrainingModule(drafter, config.objective)
    window = packer.window(indices, 0)
    weights, total = packer.weights(window), 0.0
    for batch in packer.packs(window):
        batch = dataclasses.replace(batch, features=batch.features.to(dtype), last_hidden=batch.last_hidden.to(dtype))
        loss, _ = module(batch, weights)
        loss.backward()
        total += float(loss.detach())
    return {name: p.grad.double() for name, p in drafter.named_parameters()}, total, len(window.steps)


def distance(found, expected):
    errors = [float((found[name].double() - gradient.double()).norm()) for name, gradient in expected.items()]
    return math.hypot(*errors) / math.hypot(*(float(gradient.double().norm()) for gradient in expected.values()))


@pytest.mark.parametrize("shape", heads(), ids=lambda shape: shape.head)
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_packed_padded_and_separate_samples_have_the_same_gradient(tmp_path, shape, dtype, limit):
    source, indices = TinySource(9, unsupervised=(2,)), [8, 0, 2, 5, 1, 3, 7]
    expected, loss, count = plain_gradient(source, tmp_path, shape, torch.float64, indices, micro_batch_size=1)
    assert count == 7
    for trainer in (PACKED, PACKED | {"pad_packs": True}, PACKED | {"pack_anchors": None, "pack_tokens": 400}):
        found, packed_loss, packs = plain_gradient(source, tmp_path, shape, dtype, indices, **trainer)
        assert packs < count
        assert packed_loss == pytest.approx(loss, rel=max(limit, 1e-12))
        assert distance(found, expected) < limit


def test_padded_packs_have_one_shape_and_count_real_tokens(tmp_path):
    source = TinySource(9)
    _, packer = packer_of(source, tmp_path, **PACKED, pad_packs=True)
    window = packer.window([0, 1, 2, 3, 4, 5, 6], 0)
    batches = [*packer.packs(window), packer.stand_in(), packer.largest()]
    assert {len(batch.input_ids) for batch in batches} == {90} and {len(batch.blocks) for batch in batches} == {16}
    module = TrainingModule(tiny_drafter(), tiny_config(tmp_path).objective)
    module.backward = lambda loss, scale_wrt_gas: loss.backward()
    module.set_gradient_accumulation_boundary = lambda boundary: None
    sums, tokens, _ = accumulate(module, batches[:-1], len(batches) - 1, packer.weights(window))
    assert tokens == sum(source.samples[index].length for index in range(7))
    values = sums.reduce()[0]
    real = sum(int(batch.blocks.mask.any(dim=1).sum()) for batch in batches[:-1])
    assert values["acceptance_length_proxy_count"] == [real] and real < 16 * len(batches)
    assert values["weight_ce"][0] == pytest.approx(packer.weights(window).ce)


def test_padding_is_finite_and_gets_no_gradient(tmp_path):
    _, packer = packer_of(TinySource(4), tmp_path, **PACKED, pad_packs=True)
    drafter = tiny_drafter()
    batch = next(packer.packs(packer.window([0], 0)))
    real = int(batch.blocks.mask.any(dim=1).sum())
    batch.features.requires_grad_()
    hidden = drafter(batch).hidden
    assert bool(torch.isfinite(hidden).all())
    loss, _ = TrainingModule(drafter, tiny_config(tmp_path).objective)(batch, packer.weights(packer.window([0], 0)))
    loss.backward()
    assert real < 16 and not batch.features.grad[-batch.padding:].any()
    assert batch.features.grad[:-batch.padding].any()


@pytest.mark.parametrize("stage,precision,offload", [
    (0, "fp32", False), (1, "fp32", False), (2, "fp32", False), (3, "fp32", False), (1, "bf16", False),
    (2, "bf16", False), (3, "bf16", False), (2, "fp32", True), (3, "fp32", True),
])
def test_any_number_of_packs_accumulates_exactly(tmp_path, stage, precision, offload):
    """Windows of 1, 4, 2 and 3 packs through one engine, each against the sum of its packs' own gradients."""
    from deepspeed.utils import safe_get_full_grad

    config, packer = packer_of(TinySource(12), tmp_path, **PACKED, precision=precision, global_batch_size=11)
    config.engine.zero_stage = stage
    if offload:
        config.engine.deepspeed = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    engine = initialize(TrainingModule(tiny_drafter(), config.objective), config.trainer, config.optimizer,
                        config.engine)
    prime(engine, SHAPE, packer.stand_in())
    drafter = tiny_drafter().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    module, counts = TrainingModule(drafter, config.objective), []
    for indices in ([3], list(range(11)), [11, 4, 7], [6, 5, 4, 8, 2, 10]):
        window = packer.window(indices, 0)
        counts.append(len(window.steps))
        weights = total_weights(packer, window)
        accumulate(engine, packer.packs(window), len(window.steps), weights)
        found = {name: safe_get_full_grad(p).detach().float().clone() for name, p in named_trainable(engine)}
        engine.step()  # at the learning rate 0 of prime: the weights stay
        expected = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in drafter.named_parameters()}
        for batch in packer.packs(window):
            module.zero_grad(set_to_none=True)
            module(batch, weights)[0].backward()
            for name, p in drafter.named_parameters():
                expected[name] += p.grad.float()
        assert distance(found, expected) < 1e-6
    assert len(set(counts)) >= 3 and counts[0] == 1 and max(counts) > 2


def test_any_window_size_can_be_packed():
    trainer = TrainerConfig(global_batch_size=7, pack_tokens=4096, precision="fp32")
    for world, announced in ((1, 7), (2, 4), (7, 2), (16, 2)):
        config = build_config(trainer, OptimizerConfig(), EngineConfig(), world)
        assert accumulation_steps(trainer, world) == config["gradient_accumulation_steps"] == announced
        assert config["train_batch_size"] == announced * world and config["train_micro_batch_size_per_gpu"] == 1


class DyingSource(TinySource):
    """Breaks at the n-th read."""

    left = 10**9

    def get(self, indices):
        self.left -= 1
        if self.left < 0:
            raise InputRefused("the disk is gone")
        return super().get(indices)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pad_packs", [False, True])
def test_packs_after_a_resume_are_those_of_the_uninterrupted_run(tmp_path, workers, pad_packs):
    def run(name, left=10**9):
        source, seen = DyingSource(), []
        source.left = left
        config = tiny_config(tmp_path / name, **PACKED, pad_packs=pad_packs, global_batch_size=5, save_every=1,
                             keep_last=1)
        config.data.num_workers = workers
        trainer = tiny_trainer(None, config=config, source=source)
        window = trainer.packer.window
        trainer.packer.window = lambda indices, epoch: seen.append(window(indices, epoch)) or seen[-1]
        assert not hasattr(source, "documents")
        trainer.packer._documents = [row.sample for row in source.rows]
        first = trainer.run() if left == 10**9 else None
        if first is None:
            with pytest.raises(InputRefused, match="the disk is gone"):
                trainer.run()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return seen, [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]

    whole, rows = run("whole")
    assert len(whole) == 10 and max(len(window.steps) for window in whole) > 1
    _, before = run("parts", left=9)
    assert 0 < len(before) < 8
    rest, resumed = run("parts")
    assert rest == whole[-len(rest):] and len(rest) < 10
    assert resumed == rows


def test_the_rehearsed_pack_is_at_least_as_large_as_any(tmp_path):
    source = TinySource(12)
    for trainer in (PACKED, PACKED | {"pack_anchors": None}, {"micro_batch_size": 3}):
        _, packer = packer_of(source, tmp_path, **trainer)
        largest = packer.largest()
        assert largest.blocks.mask.any()
        for epoch in range(5):
            for batch in packer.packs(packer.window([(5 * epoch + k) % 12 for k in range(9)], epoch)):
                assert len(batch.input_ids) <= len(largest.input_ids) and len(batch.blocks) <= len(largest.blocks)


def test_the_index_is_believed_before_masks_are_read(tmp_path):
    source = TinySource(6)
    source.samples = [SampleInfo(i.sample_id, i.domain, i.length, 3) for i in source.samples]
    _, packer = packer_of(source, tmp_path, **PACKED | {"pack_anchors": 6})
    assert len(packer.window([0, 1, 2, 3, 4, 5], 0).steps) >= 3
    assert source.read == []


def test_a_sample_longer_than_a_pack_is_named(tmp_path):
    _, packer = packer_of(TinySource(6), tmp_path, pack_tokens=8, micro_batch_size=1)
    with pytest.raises(InputRefused, match=r"sample-\d.*more than trainer.pack_tokens=8"):
        packer.window([0, 1, 2, 3, 4, 5], 0)


def stored_source(source, folder, codec):
    header = StoreHeader("t", "r", "a", SHAPE.feature_layers, WIDTH, codec, "float32")
    manifest = artifacts.begin(folder, "features", "f", facts={"header": dataclasses.asdict(header)})
    writer = FeatureWriter(folder, header, shard_bytes=10**5)
    for row in source.rows:
        writer.write(row.sample, "train", row.features, row.last_hidden)
    writer.close()
    shards = join_index(folder, [row.sample.sample_id for row in source.rows], set())
    artifacts.complete(folder, manifest, ["index.jsonl"], {"shards": shards})
    return CachedFeatures(folder)


def test_an_epoch_reads_every_stored_sample_once(tmp_path, monkeypatch):
    source = TinySource(10)
    stored, read, original = stored_source(source, tmp_path, "fp32"), [], FeatureStore.read_stored
    monkeypatch.setattr(FeatureStore, "read_stored",
                        lambda self, indices, *options: read.extend(indices) or original(self, indices, *options))
    for trainer in (PACKED, {"micro_batch_size": 2}):
        (_, one), (_, other) = (packer_of(kind, tmp_path, **trainer) for kind in (stored, source))
        for indices in ([4, 1, 9, 0, 2], [3, 5, 8, 7, 6]):
            window = one.window(indices, 0)
            assert window == other.window(indices, 0) and one.weights(window) == other.weights(window)
            for batch, expected in zip(one.packs(window), other.packs(window), strict=True):
                assert torch.equal(batch.features, expected.features)
    assert sorted(read) == sorted([*range(10), *range(10)])


def test_a_pack_for_a_gpu_stays_as_it_is_stored(tmp_path, monkeypatch):
    stored = stored_source(TinySource(6), tmp_path, "int8")
    (_, packer) = packer_of(stored, tmp_path, **PACKED, pad_packs=True)
    step = packer.window([3, 0, 5], 0).steps[0]
    here = packer.pack(step, 0)
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda", 0))
    waiting = packer.pack(step, 0)
    assert waiting.states is not None and waiting.states.features.data.dtype == torch.int8
    assert len(waiting.states.features) == len(waiting.states.last_hidden) == len(waiting.input_ids) == 90
    there = to_device(waiting, torch.device("cpu"))
    assert there.states is None and torch.equal(there.features, here.features)
    assert torch.equal(there.last_hidden, here.last_hidden)
