"""The DSpark drafter with the DeepSeek-V4 style backbone: stages of experts on hyper-connected streams.

T packed tokens, N blocks, R requests, S = block_size slots, K = S draft tokens, M feature layers, L stages, n streams,
D width, E experts, r rank, V vocabulary, C padded context length.

``h_k`` here is the collapsed state *before* the last norm: the confidence head reads it so, and the norm belongs to the
way into the LM head. Embedding and LM head are the target's.
"""

from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.backbone import ContextProjection, initialise
from deepspec.drafters.base import Drafter
from deepspec.drafters.bounds import Bounds, visible
from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.sequential import MarkovHead
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights
from deepspec.drafters.v4.heads import PlainConfidenceHead, V4MarkovHead
from deepspec.drafters.v4.names import in_float32
from deepspec.drafters.v4.rotary import PartialRotary
from deepspec.drafters.v4.router import load_statistics, move_bias
from deepspec.drafters.v4.stage import V4Stage
from deepspec.drafters.v4.streams import StreamHead
from deepspec.drafters.v4.window import plan_windows

_STD = 0.02
LOAD = "router_load"  # among the sums of a pack: [L * E]


class V4Drafter(Drafter):
    """Three stages as released; parameters carry the release's names without ``mtp.{i}.``, experts are stacked."""

    def __init__(
        self, shape: DrafterShape, shared: SharedWeights, *, confidence_detach: bool = False,
        activation_checkpointing: bool = False, attention: str = "auto",
    ) -> None:
        super().__init__(shape, shared, activation_checkpointing=activation_checkpointing, attention=attention)
        assert shape.v4 is not None
        self.of = shape.v4
        self.confidence_detach = confidence_detach  # the confidence loss then trains the confidence head alone
        width = shape.hidden_size
        self.main_proj = nn.Linear(len(shape.feature_layers) * shape.target_hidden_size, width, bias=False)
        self.main_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList([V4Stage(shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        # A module of its own: ZeRO-3 gathers for the backward pass only what belongs to modules that return tensors.
        self.hc_head = StreamHead(shape.v4, width, shape.rms_norm_eps)
        self.markov_head = V4MarkovHead(shape.vocab_size, shape.markov_rank, width)
        rank = shape.markov_rank if shape.confidence_with_markov else 0
        self.confidence_head = PlainConfidenceHead(width, rank) if shape.confidence_head else None
        self._angles = PartialRotary(shape.v4.rope_head_dim, shape.rope_theta)
        initialise(self, _STD)
        for name, parameter in self.named_parameters():
            if name.endswith(("_fn", "hc_head.fn", "gate.weight", "experts.w1", "experts.w2", "experts.w3")):
                nn.init.normal_(parameter, std=_STD)

    @property
    def sequential(self) -> Optional[MarkovHead]:
        """The Markov head."""
        return self.markov_head

    @property
    def gates(self) -> list[Any]:
        """The routers of all stages."""
        layers: Any = self.layers
        return [layer.ffn.gate for layer in layers]

    def cast(self, dtype: torch.dtype) -> "V4Drafter":
        """To ``dtype``, but for what the release keeps in float32."""
        half = dtype in (torch.bfloat16, torch.float16)
        exact = {name: value.data.float() for name, value in self.named_parameters() if half and in_float32(name)}
        self.to(dtype)
        for name, parameter in self.named_parameters():
            if name in exact:
                parameter.data = exact[name]
        return self

    def forward(self, batch: TrainingBatch) -> DrafterOutput:
        """Teacher-forced pass over all blocks of a pack; makes no logits. Without blocks all results are empty."""
        blocks, shape = batch.blocks, self.shape
        context = self.project_context(batch.features)
        streams, positions = self._block_inputs(blocks.anchor_ids, blocks.anchor_positions)
        angles = self._angles(torch.cat((batch.positions, positions.flatten())))
        plan = plan_windows(blocks.anchor_rows, blocks.context_starts, len(context), shape.sliding_window)
        counted = blocks.mask.any(dim=1)[:, None].expand(streams.shape[:2])  # padding has no say in the balance
        loads = []
        for layer in self.layers:
            inputs = (streams, context, angles, plan, counted)
            if self.activation_checkpointing and torch.is_grad_enabled():
                streams, load = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                streams, load = layer(*inputs)
            loads.append(load)
        hidden = self.hc_head(streams)
        size = hidden.detach()[counted].double().square().sum()
        return DrafterOutput(
            hidden=self.norm(hidden),
            transition=self.markov_head.transitions(blocks.previous_ids, hidden),
            output_factor=self.markov_head.output_factor(),
            confidence_logits=self.confidence(hidden, blocks.previous_ids),
            sums={LOAD: torch.cat(loads), "hidden_square": size,
                  "hidden_square_count": counted.sum().double() * shape.hidden_size},
        )

    def project_context(self, features: Tensor) -> Tensor:
        """Context [T, D] of target features [T, M*D] (Eq. 2)."""
        return ContextProjection(self.main_proj, self.main_norm).forward(features.to(self.dtype))

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context half of Eq. 3: rows [L, T, 1, hd] of context [T, D] at positions [T], as keys and as values."""
        angles = self._angles(positions)
        layers: Any = self.layers
        rows = torch.stack([layer.attn.rows(context, angles) for layer in layers])[:, :, None]
        return rows, rows

    def block_hidden(
        self, anchor_ids: Tensor, anchor_positions: Tensor, keys: Tensor, values: Tensor, context_lengths: Tensor,
    ) -> Tensor:
        """h_k [R, K, D] of one block per request, for drafting.

        ``keys`` [L, R, C, 1, hd] are those of ``context_kv``, of the tokens strictly before the anchor, padded with
        anything finite; ``context_lengths`` [R] says how many are real. ``values`` are the same.
        """
        streams, positions = self._block_inputs(anchor_ids, anchor_positions)
        angles = self._angles(positions)
        bounds = Bounds.of(context_lengths, torch.zeros_like(context_lengths), self.shape.sliding_window)
        places = torch.arange(keys.shape[2], device=keys.device)
        seen = visible(places, bounds.first[:, None], bounds.stop[:, None])
        layers: Any = self.layers
        for index, layer in enumerate(layers):
            streams = layer.draft(streams, angles, keys[index, :, :, 0], seen)
        return self.hc_head(streams)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U_k [..., V] of h_k [..., D]: the norm, then the target's LM head."""
        return self.head_logits(self.norm(hidden))

    def confidence(self, hidden_k: Tensor, previous_ids: Tensor) -> Optional[Tensor]:
        """Logits [...] of Eq. 7 for h_k [..., D] and ids [...] of the tokens before; None without the head."""
        if self.confidence_head is None:
            return None
        embedded = self.markov_head.embed(previous_ids) if self.shape.confidence_with_markov else None
        if self.confidence_detach:
            hidden_k, embedded = hidden_k.detach(), None if embedded is None else embedded.detach()
        return self.confidence_head(hidden_k, embedded)

    def after_step(self, sums: Mapping[str, Sequence[float]], bias_rate: float) -> None:
        """Move every router's bias by the loads of the window; the same on all ranks, for the sums are."""
        for gate, load in zip(self.gates, self._loads(sums), strict=True):
            move_bias(gate.bias, torch.tensor(load, dtype=torch.float64), bias_rate)

    def step_metrics(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Use of the experts per stage (``load_statistics``), and the root mean square of h_k."""
        count = sums["hidden_square_count"][0]
        row = {"hidden_rms": (sums["hidden_square"][0] / count) ** 0.5 if count else 0.0}
        for index, (gate, load) in enumerate(zip(self.gates, self._loads(sums), strict=True), start=1):
            row |= {f"experts_{name}@{index}": value for name, value in load_statistics(load, gate.bias).items()}
        return row

    def _loads(self, sums: Mapping[str, Sequence[float]]) -> list[Sequence[float]]:
        load, count = sums[LOAD], self.of.num_experts
        return [load[start:start + count] for start in range(0, len(load), count)]

    def _block_inputs(self, anchor_ids: Tensor, anchor_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [N, S, n, D] of anchor and noise tokens, and their positions p .. p+S-1 [N, S]."""
        slots = torch.arange(self.shape.block_size, device=anchor_ids.device)
        ids = torch.where(slots == 0, anchor_ids[:, None], self.shape.mask_token_id)
        embedded = self._embed(ids)
        return embedded[:, :, None].expand(-1, -1, self.of.hc_mult, -1), anchor_positions[:, None] + slots
