"""Sizes of the DeepSeek-V4 style backbone that no other drafter has. Needs no torch.

D width, A heads of width hd, G groups of heads, n streams, E routed experts of width I.
"""

from dataclasses import dataclass

ALGORITHM = "dspark_v4"


@dataclass(frozen=True)
class V4Shape:
    """What decides parameters and arithmetic of the stages besides the sizes that every drafter has."""

    q_lora_rank: int
    o_groups: int  # G; each has A / G heads
    o_lora_rank: int  # of every group
    rope_head_dim: int  # last channels of a head that are rotated, in pairs of neighbours
    hc_mult: int  # n
    hc_sinkhorn_iters: int
    hc_eps: float
    num_experts: int  # E
    experts_per_token: int
    routed_scaling_factor: float
    swiglu_limit: float
