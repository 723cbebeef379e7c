"""What ``drafter.v4`` asks for, checked and completed from the target's sizes. Needs no torch.

Sizes left open follow the released drafters' proportions: ranks of a quarter of the width, eight heads to a group.
"""

from deepspec.config.schema import DrafterConfig
from deepspec.drafters.v4.shape import ALGORITHM, V4Shape
from deepspec.errors import ConfigError


def is_v4(algorithm: str) -> bool:
    """Whether drafters of this algorithm have the V4 backbone."""
    return algorithm == ALGORITHM


def takes_last_layer(target_model_type: str) -> bool:
    """Whether the target's last layer may be a feature of a block drafter: in V4 targets, whose engines capture it."""
    return target_model_type.startswith("deepseek_v4")


def heads_of(drafter: DrafterConfig, num_heads: int, head_dim: int) -> tuple[int, int]:
    """Number and width of the drafter's heads; the target's where the options leave them open."""
    return drafter.v4.num_heads or num_heads, drafter.v4.head_dim or head_dim


def _refuse(key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"drafter.{key}={value!r} is not possible with drafter.algorithm={ALGORITHM}: it must be "
                       f"{allowed}.")


def _check_common(drafter: DrafterConfig) -> None:
    if drafter.head != "vanilla":
        raise _refuse("head", drafter.head, "vanilla, the only sequential head of that layout")
    if not drafter.sample_from_anchor:
        raise _refuse("sample_from_anchor", False, "true: its blocks always predict on the anchor slot")
    if drafter.sliding_window is None:
        raise _refuse("sliding_window", None, "a number of context tokens (128 as released)")
    if drafter.unroll is not None:
        raise _refuse("unroll", drafter.unroll, "null: it drafts a block in one pass")


def _check_values(drafter: DrafterConfig) -> None:
    options = drafter.v4
    whole = ("num_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "rope_head_dim", "hc_mult",
             "hc_sinkhorn_iters", "num_experts", "experts_per_token")
    for name in whole:
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _refuse(f"v4.{name}", value, "a whole number of at least 1")
    for name in ("rope_theta", "hc_eps", "routed_scaling_factor", "swiglu_limit"):
        value = getattr(options, name)
        if not 0.0 < value < float("inf"):
            raise _refuse(f"v4.{name}", value, "a finite number above 0")
    if not 0.0 <= options.router_bias_rate < 1.0:
        raise _refuse("v4.router_bias_rate", options.router_bias_rate, "at least 0 (never moved) and below 1")
    if options.experts_per_token > options.num_experts:
        raise _refuse("v4.experts_per_token", options.experts_per_token,
                      f"at most drafter.v4.num_experts={options.num_experts}")


def v4_shape(drafter: DrafterConfig, *, hidden_size: int, num_heads: int, head_dim: int) -> V4Shape:
    """Sizes of the backbone for a target of these sizes. Raises ConfigError naming the option that does not fit."""
    _check_common(drafter)
    _check_values(drafter)
    options = drafter.v4
    heads, width = heads_of(drafter, num_heads, head_dim)
    groups = options.o_groups or max(1, heads // 8)
    if heads % groups:
        raise _refuse("v4.o_groups", groups, f"a divisor of the {heads} heads")
    rotated = options.rope_head_dim or min(64, width)
    if rotated % 2 or rotated > width:
        raise _refuse("v4.rope_head_dim", rotated, f"even and at most the head width of {width}")
    rank = max(8, hidden_size // 4)
    return V4Shape(
        q_lora_rank=options.q_lora_rank or rank, o_groups=groups, o_lora_rank=options.o_lora_rank or rank,
        rope_head_dim=rotated, hc_mult=options.hc_mult, hc_sinkhorn_iters=options.hc_sinkhorn_iters,
        hc_eps=options.hc_eps, num_experts=options.num_experts, experts_per_token=options.experts_per_token,
        routed_scaling_factor=options.routed_scaling_factor, swiglu_limit=options.swiglu_limit,
    )
