"""A tiny drafter and random samples of unequal length, for tests of the training loop."""

import dataclasses
from pathlib import Path
from typing import Any, Optional, Sequence

import torch

from deepspec.config.schema import Config, DrafterConfig, RunConfig, TargetConfig
from deepspec.data.batch import FeatureSample, Sample
from deepspec.data.sources import SampleInfo
from deepspec.drafters.registry import build_drafter
from deepspec.drafters.types import DrafterShape, SharedWeights
from deepspec.drafters.v4.shape import V4Shape
from deepspec.training.identity import run_identity
from deepspec.training.packs import Packer
from deepspec.training.trainer import DrafterTrainer

VOCABULARY, WIDTH = 96, 16
SHAPE = DrafterShape(
    algorithm="dspark", hidden_size=WIDTH, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    vocab_size=VOCABULARY, rms_norm_eps=1e-6, rope_theta=10000.0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=256, block_size=4, sample_from_anchor=True, head="vanilla", markov_rank=8,
    confidence_head=True, confidence_with_markov=True, mask_token_id=95, feature_layers=(0, 2), num_target_layers=4,
    target_hidden_size=WIDTH, target_model_type="qwen3",
)

V4_SHAPE = dataclasses.replace(
    SHAPE, algorithm="dspark_v4", num_kv_heads=1, intermediate_size=12, sliding_window=6,
    v4=V4Shape(q_lora_rank=8, o_groups=2, o_lora_rank=8, rope_head_dim=4, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
               num_experts=6, experts_per_token=2, routed_scaling_factor=1.5, swiglu_limit=10.0))


class TinySource:
    """Random features; ``poison`` maps an index to a value put into its features, ``unsupervised`` have no anchors."""

    def __init__(self, count: int = 12, seed: int = 3, poison: Optional[dict[int, float]] = None,
                 unsupervised: Sequence[int] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows: list[FeatureSample] = []
        for index in range(count):
            length = int(torch.randint(6, 40, (1,), generator=generator))
            mask = torch.arange(length) >= max(1, length // 3)
            if index in unsupervised:
                mask[:] = False
            sample = Sample(f"sample-{index}", ("math", "code", "chat")[index % 3],
                            torch.randint(0, VOCABULARY - 2, (length,), generator=generator), mask)
            features = torch.randn(length, len(SHAPE.feature_layers) * WIDTH, generator=generator)
            features[-1] += (poison or {}).get(index, 0.0)
            last = torch.randn(length, WIDTH, generator=generator)
            if index in (poison or {}):
                features[:] = (poison or {})[index]
            self.rows.append(FeatureSample(sample, features, last))
        self.samples = [SampleInfo(r.sample.sample_id, r.sample.domain, len(r.sample.input_ids)) for r in self.rows]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, indices: Sequence[int]) -> list[FeatureSample]:
        self.read += list(indices)
        return [self.rows[index] for index in indices]


def shared_weights() -> SharedWeights:
    generator = torch.Generator().manual_seed(11)
    return SharedWeights(torch.randn(VOCABULARY, WIDTH, generator=generator),
                         torch.randn(VOCABULARY, WIDTH, generator=generator), "target-fingerprint")


def tiny_config(run_dir: Path, **trainer: Any) -> Config:
    values: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "num_anchors": 6, "precision": "fp32",
                              "epochs": 4, "max_steps": 10, "save_every": 0, "max_bad_steps": 3, "log_every": 1}
    config = Config(run=RunConfig(name="tiny", dir=str(run_dir), seed=5),
                    target=TargetConfig(name="tiny", feature_layers=[0, 2], mask_token_id=95),
                    drafter=DrafterConfig(num_layers=2, block_size=4, markov_rank=8))
    config.trainer = dataclasses.replace(config.trainer, **(values | trainer))
    config.optimizer = dataclasses.replace(config.optimizer, lr=1e-2, warmup_ratio=0.2)
    config.tracking.mode = "disabled"
    config.data.num_workers = 0  # tests count reads; see test_training_loading.py for packs made ahead
    return config


def tiny_drafter(shape: DrafterShape = SHAPE) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_drafter(shape, shared_weights())


def tiny_trainer(run_dir: Path, *, config: Optional[Config] = None, source: Optional[TinySource] = None,
                 shape: DrafterShape = SHAPE, **trainer: Any) -> DrafterTrainer:
    config = config or tiny_config(run_dir, **trainer)
    source = TinySource() if source is None else source
    packer = Packer(source, shape, config.trainer, config.objective, seed=config.run.seed,
                    num_workers=config.data.num_workers)
    identity = run_identity(config, shape, target="target-fingerprint", data="data-fingerprint")
    return DrafterTrainer(tiny_drafter(shape), packer, config, identity=identity)
