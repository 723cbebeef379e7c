"""Bytes per rank of training the drafter: parameters, gradients, optimizer, activations, objective."""

from dataclasses import dataclass

from deepspec.config.schema import Config, draft_length, drafter_layers, is_autoregressive
from deepspec.drafters.v4.options import is_v4
from deepspec.planning.packs import PackPlan
from deepspec.planning.sizes import ParameterCount, drafter_head_dim, drafter_kv_heads
from deepspec.planning.sizes_v4 import kept_per_slot, kept_per_token, stream_bytes

ZERO_STAGES = (0, 1, 2, 3)
RANK_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank that live through the whole training."""

    zero_stage: int
    ranks: int
    parameters: int
    gradients: int
    optimizer: int  # fp32 masters (bf16 training), the two Adam moments, and the averaged weights

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one rank that do not depend on the ZeRO stage."""

    frozen: int  # the target's embedding and LM head
    target: int  # the whole target, for online features and real decoding
    batch: int  # features and last hidden states of the pack at work and of those made ahead
    activations: int  # what the backward pass keeps
    objective: int  # one chunk of logits and the gradient of the block states

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.frozen + self.target + self.batch + self.activations + self.objective


def state_bytes(trainable: int, precision: str, zero_stage: int, ranks: int, averaged: bool = False) -> StateBytes:
    """Model state of one rank: the optimizer is split from ZeRO stage 1, gradients from 2, parameters at 3.

    bf16 training keeps 2 B of parameter, 4 B of accumulated gradient, 4 B of master and 8 B of moments per element;
    fp32 training 4, 4 and 8 B. ``averaged`` weights take 4 B more, split like the optimizer's state.
    """
    parameter, gradient, optimizer = (2, 4, 12) if precision == "bf16" else (4, 4, 8)
    optimizer += 4 * averaged

    def share(size: int, from_stage: int) -> int:
        return -(-trainable // ranks) * size if zero_stage >= from_stage else trainable * size

    return StateBytes(zero_stage, ranks, share(parameter, 3), share(gradient, 2), share(optimizer, 1))


def _v4_bytes(config: Config, tokens: int, slots: int, width: int) -> int:
    """``activation_bytes`` of the DeepSeek-V4 style backbone; with checkpoints one stage's and the streams between."""
    slot, layers = kept_per_slot(config, width), config.drafter.num_layers
    slot = slot + layers * stream_bytes(config, width) if config.trainer.activation_checkpointing else layers * slot
    ends = (tokens * 2 + slots * 4) * config.target.shape.hidden_size * width
    return slots * slot + tokens * layers * kept_per_token(config, width) + ends


def activation_bytes(config: Config, tokens: int, slots: int, width: int) -> int:
    """What backward keeps for ``tokens`` context tokens and ``slots`` block slots, elements of ``width`` bytes.

    A block slot keeps the inputs of every matmul and norm of a layer; a context token what its keys and values need.
    """
    shape, drafter = config.target.shape, config.drafter
    hidden = shape.hidden_size
    if drafter.algorithm == "medusa":  # no context, no attention
        return slots * hidden * (3 * drafter.num_layers + 1) * width
    if is_v4(drafter.algorithm):
        return _v4_bytes(config, tokens, slots, width)
    queries, keys = shape.num_heads * drafter_head_dim(config), drafter_kv_heads(config) * drafter_head_dim(config)
    inner = drafter.intermediate_size or shape.intermediate_size
    slot = 5 * hidden + 3 * queries + 3 * keys + 3 * inner
    if config.trainer.activation_checkpointing:
        slot = hidden + slot // max(1, drafter_layers(drafter))
    layers = drafter_layers(drafter) * (slots * slot + tokens * (hidden + 3 * keys))
    if is_autoregressive(drafter.algorithm):
        # Every step keeps the context's keys and values beside those of its chain so far.
        steps = drafter.unroll or drafter.block_size
        layers += 2 * keys * (steps * tokens + slots * (steps + 1) // 2)
    ends = tokens * 2 * hidden + slots * 3 * hidden
    return (layers + ends) * width


def objective_bytes(config: Config, labels: int) -> int:
    """One chunk of fp32 logits (drafter, target and transition of each label at most) and the gradients made with it:
    of block states, of transitions and of their table.
    """
    shape, rank = config.target.shape, config.drafter.markov_rank if config.drafter.head != "none" else 0
    chunk = min(config.objective.chunk_megabytes * 2**20, 3 * labels * shape.vocab_size * 4)
    return chunk + 4 * (labels * (shape.hidden_size + rank) + shape.vocab_size * rank)


def step_bytes(config: Config, parameters: ParameterCount, packs: PackPlan) -> StepBytes:
    """Everything of one rank besides model state, for its largest pack."""
    width = 2 if config.trainer.precision == "bf16" else 4
    hidden, taps = config.target.shape.hidden_size, len(config.target.feature_layers)
    slots = packs.anchors * config.drafter.block_size
    ahead = config.data.num_workers + 1 if config.data.num_workers else 0
    ahead += config.features.queue_depth if config.features.mode == "disaggregated" else 0
    target_width = 2 if config.target.dtype == "bfloat16" else 4
    whole = config.features.mode in ("online", "hybrid") or config.trainer.decode_every > 0
    online = parameters.target * target_width if whole else 0
    objective = objective_bytes(config, packs.anchors * draft_length(config.drafter))
    return StepBytes(
        frozen=0 if online else parameters.frozen * target_width, target=online,
        batch=(1 + ahead) * packs.tokens * (taps + 1) * hidden * width,
        activations=activation_bytes(config, packs.tokens, slots, width), objective=objective,
    )
