"""What every drafter is to training, checkpoints and export. N blocks, K draft tokens, D width, V vocabulary."""

from typing import Mapping, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.attention import check_backend
from deepspec.drafters.precision import exact
from deepspec.drafters.rope import RotaryTable
from deepspec.drafters.types import DrafterOutput, DrafterShape, SharedWeights
from deepspec.drafters.vocabulary import outside


class Drafter(nn.Module):
    """A frozen embedding and LM head, and what an algorithm puts between them.

    ``shared`` is no part of the module's state: it is moved by nobody and must be on the device the drafter runs on.
    ``layers`` are the decoder layers, each a module whose forward pass ``trainer.compile`` may compile.
    """

    layers: nn.ModuleList

    def __init__(
        self, shape: DrafterShape, shared: SharedWeights, *, activation_checkpointing: bool = False,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(attention, shared.embed.device)
        self.shape = shape
        self.shared = shared
        self.activation_checkpointing = activation_checkpointing
        self.attention = attention  # auto | chunked | flex
        self._rotary = RotaryTable(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype the backbone computes in."""
        return next(self.parameters()).dtype

    def forward(self, batch: TrainingBatch) -> DrafterOutput:
        """Teacher-forced pass over all blocks of a pack; makes no logits. Without blocks all results are empty."""
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> "Drafter":
        """Move the weights to ``dtype``, as they are served; in place. Some algorithms keep a few in float32."""
        return self.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, by name: parameters, and what an algorithm keeps in buffers."""
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def after_step(self, sums: Mapping[str, Sequence[float]], bias_rate: float) -> None:
        """Called on every rank after an optimizer step that was not skipped, with the reduced sums of its window."""

    def step_metrics(self, sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """What a row of metrics.jsonl says besides the objective, from the reduced sums of a window."""
        return {}

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U_k [..., V] of h_k [..., D] as ``block_hidden`` or ``draft_step`` returns them."""
        return self.head_logits(hidden)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """LM head of states [..., D] after the last norm: [..., V], float32 at least, scaled, capped as the target's.

        Minus infinity at tokens outside a reduced draft vocabulary.
        """
        weight = self.shared.lm_head
        logits = exact(functional.linear(hidden.to(weight.dtype), weight))
        if self.shape.logit_scale != 1.0:
            logits = logits * self.shape.logit_scale
        cap = self.shape.final_logit_softcap
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        unknown = outside(self.shape, logits.device)
        return logits if unknown is None else logits.masked_fill(unknown, -torch.inf)

    def confidence(self, hidden_k: Tensor, previous_ids: Tensor) -> Optional[Tensor]:
        """Logits [...] of Eq. 7 for h_k [..., D] and ids [...] of the tokens before; None without the head."""
        return None

    def _embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of ids [...], scaled where the target scales them."""
        states = functional.embedding(ids, self.shared.embed).to(self.dtype)
        return states if self.shape.embed_scale == 1.0 else states * self.shape.embed_scale
