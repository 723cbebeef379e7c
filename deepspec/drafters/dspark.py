"""The DSpark drafter; DFlash is the same model without sequential and confidence head.

T packed tokens, N blocks, R requests, S = block_size slots, K draft tokens, M feature layers, L drafter layers,
D width, V vocabulary, C padded context length.
"""

from typing import Iterable, Optional, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.attention import choose_backend, plan_context
from deepspec.drafters.backbone import ContextProjection, DraftLayer, initialise
from deepspec.drafters.base import Drafter
from deepspec.drafters.confidence import ConfidenceHead
from deepspec.drafters.gemma4 import Gemma4Layer
from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.sequential import MarkovHead, build_head
from deepspec.drafters.types import GEMMA4, QWEN3, DrafterOutput, DrafterShape, SharedWeights

_LAYERS: dict[str, type[DraftLayer]] = {QWEN3: DraftLayer, GEMMA4: Gemma4Layer}


class DSparkDrafter(Drafter):
    """Parallel backbone, sequential head and confidence head over a frozen embedding and LM head.

    Parameters carry the names of the published checkpoints.
    """

    def __init__(
        self, shape: DrafterShape, shared: SharedWeights, *, confidence_detach: bool = False,
        activation_checkpointing: bool = False, attention: str = "auto",
    ) -> None:
        super().__init__(shape, shared, activation_checkpointing=activation_checkpointing, attention=attention)
        self.confidence_detach = confidence_detach  # the confidence loss then trains the confidence head alone
        width = shape.hidden_size
        self.fc = nn.Linear(len(shape.feature_layers) * shape.target_hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.rms_norm_eps)
        self.layers = nn.ModuleList([_LAYERS[shape.block](shape) for _ in range(shape.num_layers)])
        self.norm = RMSNorm(width, shape.rms_norm_eps)
        self.markov_head = build_head(shape)
        rank = shape.markov_rank if shape.confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(width, rank) if shape.confidence_head else None
        initialise(self)

    @property
    def _blocks(self) -> Iterable[DraftLayer]:
        return cast(Iterable[DraftLayer], self.layers)

    @property
    def sequential(self) -> Optional[MarkovHead]:
        """The sequential head, None if there is none."""
        return self.markov_head

    def forward(self, batch: TrainingBatch) -> DrafterOutput:
        """Teacher-forced pass over all blocks of a pack; makes no logits. Without blocks all results are empty."""
        blocks, shape = batch.blocks, self.shape
        context = self.project_context(batch.features)
        states, positions = self._block_inputs(blocks.anchor_ids, blocks.anchor_positions)
        angles = self._rotary(torch.cat((batch.positions, positions.flatten())))
        plan = plan_context(
            blocks.anchor_rows, blocks.context_starts, len(context), slots=shape.block_size, heads=shape.num_heads,
            window=shape.sliding_window, backend=choose_backend(self.attention, states, shape.head_dim),
            scale=shape.attention_scale,
        )
        for layer in self.layers:
            inputs = (states, context, angles, plan)
            if self.activation_checkpointing and torch.is_grad_enabled():
                states = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                states = layer(*inputs)
        hidden = self._predicting(self.norm(states))
        head = self.markov_head
        return DrafterOutput(
            hidden=hidden,
            transition=None if head is None else head.transitions(blocks.previous_ids, hidden),
            output_factor=None if head is None else head.output_factor(),
            confidence_logits=self.confidence(hidden, blocks.previous_ids),
        )

    def project_context(self, features: Tensor) -> Tensor:
        """Context [T, D] of target features [T, M*D] (Eq. 2)."""
        return ContextProjection(self.fc, self.hidden_norm).forward(features.to(self.dtype))

    def context_kv(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context half of Eq. 3: keys (RoPE applied) and values [L, T, Hkv, hd] of context [T, D] at positions [T]."""
        angles = self._rotary(positions)
        pairs = [layer.self_attn.keys_values(context, angles) for layer in self._blocks]
        return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])

    def block_hidden(
        self, anchor_ids: Tensor, anchor_positions: Tensor, keys: Tensor, values: Tensor, context_lengths: Tensor,
    ) -> Tensor:
        """h_k [R, K, D] of one block per request, for drafting.

        ``keys`` and ``values`` [L, R, C, Hkv, hd] are those of ``context_kv``, of the tokens strictly before the
        anchor, padded with anything finite; ``context_lengths`` [R] says how many are real.
        """
        states, positions = self._block_inputs(anchor_ids, anchor_positions)
        angles = self._rotary(positions)
        for index, layer in enumerate(self._blocks):
            states = layer.draft(states, angles, keys[index], values[index], context_lengths)
        return self._predicting(self.norm(states))

    def confidence(self, hidden_k: Tensor, previous_ids: Tensor) -> Optional[Tensor]:
        """Logits [...] of Eq. 7 for h_k [..., D] and ids [...] of the tokens before; None without the head."""
        if self.confidence_head is None:
            return None
        head = self.markov_head if self.shape.confidence_with_markov else None
        embedded = None if head is None else head.embed(previous_ids)
        if self.confidence_detach:
            hidden_k, embedded = hidden_k.detach(), None if embedded is None else embedded.detach()
        return self.confidence_head(hidden_k, embedded)

    def _block_inputs(self, anchor_ids: Tensor, anchor_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [N, S, D] of anchor and mask tokens, and their positions p .. p+S-1 [N, S]."""
        slots = torch.arange(self.shape.block_size, device=anchor_ids.device)
        ids = torch.where(slots == 0, anchor_ids[:, None], self.shape.mask_token_id)
        return self._embed(ids), anchor_positions[:, None] + slots

    def _predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states [.., K, D] of the slots that predict: all, or all but the anchor's."""
        return hidden if self.shape.sample_from_anchor else hidden[:, 1:]
