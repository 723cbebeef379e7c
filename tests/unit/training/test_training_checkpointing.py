"""Activation checkpointing under the engine: layers run again in the backward pass, also where ZeRO-3 emptied them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from tiny_training import SHAPE, TinySource, shared_weights, tiny_config

from deepspec.drafters.registry import build_drafter
from deepspec.training.identity import run_identity
from deepspec.training.packs import Packer
from deepspec.training.trainer import DrafterTrainer


def trained(run_dir: Path, stage: int, head: str, checkpointing: bool) -> dict[str, torch.Tensor]:
    config = tiny_config(run_dir, max_steps=2)
    config.engine.zero_stage = stage
    # Parameters below the threshold are never emptied, and these are all small.
    config.engine.deepspeed = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    shape = dataclasses.replace(SHAPE, head=head, sliding_window=5)
    torch.manual_seed(0)
    drafter = build_drafter(shape, shared_weights(), activation_checkpointing=checkpointing)
    packer = Packer(TinySource(), shape, config.trainer, config.objective, seed=5, num_workers=0)
    identity = run_identity(config, shape, target="target", data="data")
    trainer = DrafterTrainer(drafter, packer, config, identity=identity)
    trainer.run()
    named = trainer.engine.module.named_parameters()
    return {name: (safe_get_full_fp32_param(item) if stage else item).detach().clone() for name, item in named}


@pytest.mark.parametrize("stage,head", [(0, "rnn"), (2, "rnn"), (3, "rnn"), (3, "vanilla")])
def test_training_is_the_same_with_checkpointing(tmp_path: Path, stage: int, head: str) -> None:
    plain, saving = (trained(tmp_path / str(flag), stage, head, flag) for flag in (False, True))
    torch.manual_seed(0)
    start = dict(build_drafter(dataclasses.replace(SHAPE, head=head), shared_weights()).named_parameters())
    assert len(plain) == len(start)
    for name, value in plain.items():
        torch.testing.assert_close(saving[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert not torch.equal(plain["drafter.layers.0.self_attn.k_proj.weight"], start["layers.0.self_attn.k_proj.weight"])
