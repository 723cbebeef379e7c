"""Autoregressive drafters: one decoder layer whose own hidden states go back into it, token by token (EAGLE-3, MTP).

T packed tokens, N blocks, R requests, K steps, M feature layers, D width, Hkv key heads of width hd, C context rows.

Row i of a sequence is made of what the target knew at token i and of the embedding of token i + 1, has RoPE position i
and predicts token i + 2. With the last verified token at p, the rows 0 .. p - 2 are context, row p - 1 is step 0 of a
chain and predicts token p + 1, and step j stands at position p - 1 + j, takes the embedding of token p + j and, instead
of the target's state, the hidden state of step j - 1. That is the shift of serving engines: features of token t are
paired with token t + 1. With one layer, keys and values of a row depend on the row alone, so context rows need no
attention, and those of training are the ones that decoding computes from the same features.

Training unrolls K steps from every sampled anchor (training-time test): each step sees the context rows and its own
chain, no other block. An anchor at the very first token has no row before it: it starts from zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspec.data.batch import TrainingBatch
from deepspec.drafters.attention import ContextPlan, attend_chain, choose_backend, inject_context, plan_chain
from deepspec.drafters.backbone import Angles, DraftAttention, DraftMLP
from deepspec.drafters.base import Drafter
from deepspec.drafters.norm import RMSNorm
from deepspec.drafters.types import DrafterOutput, DrafterShape

KeysValues = tuple[Tensor, Tensor]


def _with_steps(context: KeysValues, steps: list[KeysValues]) -> KeysValues:
    """Keys and values [T + N*(j+1), Hkv, hd]: those of the context, then block by block those of its steps."""
    keys, values = (
        torch.cat((rows, torch.stack(own, dim=1).flatten(0, 1))) for rows, own in zip(context, zip(*steps), strict=True)
    )
    return keys, values


class RecurrentLayer(nn.Module):
    """Decoder layer over the embedding of the next token and a hidden state; subclasses say how the two are joined."""

    def __init__(self, shape: DrafterShape, input_size: int, bias: bool = False) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = DraftAttention(shape, input_size, bias)
        self.mlp = DraftMLP(shape)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def join(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Input of attention [..., A] and residual [..., D] of embeddings and states [..., D]."""
        raise NotImplementedError

    def context_kv(self, embedded: Tensor, states: Tensor, angles: Angles) -> KeysValues:
        """Keys (RoPE applied) and values [T, Hkv, hd] of rows with embeddings and states [T, D]."""
        return self.self_attn.keys_values(self.join(embedded, states)[0], angles)

    def forward(
        self, embedded: Tensor, states: Tensor, angles: Angles, context: KeysValues, past: list[KeysValues],
        plan: ContextPlan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of all chains of a pack: output [N, D] and the step's keys and values [N, Hkv, hd].

        ``embedded`` and ``states`` [N, D]; ``past`` holds the keys and values of the chains' earlier steps.
        """
        inputs, residual = self.join(embedded, states)
        keys, values = self.self_attn.keys_values(inputs, angles)
        seen = _with_steps(context, [*past, (keys, values)])
        attended = inject_context(self.self_attn.queries(inputs, angles)[:, None], *seen, plan)
        return self._finish(residual, attended.flatten(1)), keys, values

    def draft(self, embedded: Tensor, states: Tensor, angles: Angles, chains: "Chains", step: int) -> Tensor:
        """The same step [R, D] while drafting; its keys and values are added to ``chains``."""
        inputs, residual = self.join(embedded, states)
        place = chains.capacity + step
        chains.keys[:, place], chains.values[:, place] = self.self_attn.keys_values(inputs, angles)
        attended = attend_chain(self.self_attn.queries(inputs, angles), chains.keys, chains.values, chains.seen(step))
        return self._finish(residual, attended.flatten(1))

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        states = residual + self.self_attn.o_proj(attended)
        return states + self.mlp(self.post_attention_layernorm(states))


@dataclass(frozen=True)
class Chains:
    """R chains while they are drafted: context rows, padded to ``capacity``, then K places for the steps."""

    keys: Tensor  # [R, C + K, Hkv, hd]
    values: Tensor
    lengths: Tensor  # [R] int64, real context rows: the position of step 0
    capacity: int  # C

    def seen(self, step: int) -> Tensor:
        """Rows that a step sees, its own included: [R, C + K] bool."""
        places = torch.arange(self.keys.shape[1], device=self.lengths.device)
        own = (places >= self.capacity) & (places <= self.capacity + step)
        return own | (places < self.lengths[:, None])


class AutoregressiveDrafter(Drafter):
    """A recurrent layer between the target's states and its LM head; subclasses are the algorithms."""

    sequential = markov_head = confidence_head = None  # its own hidden states already know the tokens before

    def __init__(self, shape: DrafterShape, shared: Any, *, confidence_detach: bool = False, **options: Any) -> None:
        """``confidence_detach`` is taken, like every drafter's options, and has nothing to detach."""
        super().__init__(shape, shared, **options)

    @property
    def layer(self) -> RecurrentLayer:
        """The one layer."""
        layer: Any = self.layers[0]
        return layer

    def project_context(self, features: Tensor) -> Tensor:
        """States [T, D] of target features [T, M*D], which step 0 takes."""
        raise NotImplementedError

    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Of the layer's output [..., D]: what the LM head reads, and the state of the next step."""
        raise NotImplementedError

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [..., D] of the tokens after the rows at ``positions`` [...]."""
        return self._embed(ids)

    def forward(self, batch: TrainingBatch) -> DrafterOutput:
        """Teacher-forced chains of all blocks of a pack, as many steps as the blocks have labels; makes no logits.

        Step j is fed token p + j of the data and its own hidden states, never the target's beyond row p - 1.
        """
        blocks, shape, layer = batch.blocks, self.shape, self.layer
        steps = blocks.previous_ids.shape[1]
        context = self.project_context(batch.features)
        # The last token of a document has no successor there; no chain sees its row.
        known = layer.context_kv(
            self.embed(batch.input_ids.roll(-1), batch.positions), context, self._rotary(batch.positions))
        begins = blocks.anchor_rows > blocks.context_starts
        rows = torch.where(begins, blocks.anchor_rows - 1, blocks.context_starts)
        states = context[rows] * begins[:, None].to(context.dtype)
        plans = plan_chain(rows, blocks.context_starts, len(context), steps=steps, heads=shape.num_heads,
                           backend=choose_backend(self.attention, states, shape.head_dim))
        hidden: list[Tensor] = []
        past: list[KeysValues] = []
        for step, plan in enumerate(plans):
            positions = blocks.anchor_positions - 1 + step
            inputs = (self.embed(blocks.previous_ids[:, step], positions), states, self._rotary(positions), known,
                      list(past), plan)
            if self.activation_checkpointing and torch.is_grad_enabled():
                output, *own = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                output, *own = layer(*inputs)
            past.append((own[0], own[1]))
            predicting, states = self.predict(output)
            hidden.append(predicting)
        return DrafterOutput(torch.stack(hidden, dim=1), None, None, None)

    def context_kv(self, context: Tensor, next_ids: Tensor, positions: Tensor) -> KeysValues:
        """Keys and values [T, Hkv, hd] of rows: states [T, D] at ``positions`` [T] with the ids [T] that follow them.
        """
        return self.layer.context_kv(self.embed(next_ids, positions), context, self._rotary(positions))

    def open_chains(self, keys: Tensor, values: Tensor, lengths: Tensor) -> Chains:
        """Chains over padded context keys and values [R, C, Hkv, hd], of which ``lengths`` [R] rows are real.

        The real rows are those strictly before step 0; padding may hold anything finite.
        """
        room = keys.new_zeros(len(keys), self.shape.draft_length, *keys.shape[2:])
        return Chains(torch.cat((keys, room), dim=1), torch.cat((values, room), dim=1), lengths, keys.shape[1])

    def draft_step(self, chains: Chains, step: int, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """h_k [R, D] of step ``step`` and the state for the next, from states [R, D] and the ids [R] drafted last."""
        positions = chains.lengths + step
        output = self.layer.draft(self.embed(ids, positions), states, self._rotary(positions), chains, step)
        return self.predict(output)
