"""Options of the DeepSeek-V4 style backbone (``drafter.algorithm=dspark_v4``). See schema.py."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class V4Config:
    """Sizes of the stages beyond those of every drafter. ``drafter.intermediate_size`` is the width of one expert."""

    num_heads: Optional[int] = None  # query heads; null: the target's
    head_dim: Optional[int] = None  # width of a head, and of the one key-value row per position; null: the target's
    q_lora_rank: Optional[int] = None  # null: a quarter of the target's width
    o_groups: Optional[int] = None  # groups of heads in the output projection; null: one per 8 heads
    o_lora_rank: Optional[int] = None  # of every group; null: a quarter of the target's width
    rope_head_dim: Optional[int] = None  # rotated channels of a head; null: 64, or the whole head if it is narrower
    rope_theta: float = 10000.0
    hc_mult: int = 4  # residual streams
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_experts: int = 256
    experts_per_token: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0  # clamp of an expert's gate from above and of its up-projection to both sides
    # step of every expert's bias towards the mean load, once per optimizer step: the only thing that balances; 0: never
    router_bias_rate: float = 1e-3
