"""Small V4-style drafters, and the same arithmetic written out slot by slot in float64, one thing wrong if asked."""

from typing import Any

import torch
from drafter_cases import SHAPE, drafter
from torch import Tensor

from deepspec.drafters.types import DrafterShape
from deepspec.drafters.v4.drafter import V4Drafter
from deepspec.drafters.v4.shape import V4Shape

OF = V4Shape(q_lora_rank=12, o_groups=2, o_lora_rank=6, rope_head_dim=4, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
             num_experts=6, experts_per_token=2, routed_scaling_factor=1.5, swiglu_limit=2.0)
MUTANTS = (
    "transposed_comb", "post_without_2", "sinkhorn_rows_first", "window+1", "window-1", "position+1", "position-1",
    "rope_halves", "rope_first_channels", "no_inverse_rope", "no_sink", "norm_before_confidence", "no_head_norm",
    "causal_block", "bias_in_weights", "unnormalised_weights", "scaled_shared_expert", "unclamped", "context_norm",
    "mean_at_the_end", "window_per_slot",
)


def v4_shape(**changes: Any) -> DrafterShape:
    from dataclasses import replace

    of = replace(OF, **{key: changes.pop(key) for key in list(changes) if key in V4Shape.__dataclass_fields__})
    values: dict[str, Any] = {"algorithm": "dspark_v4", "num_layers": 3, "num_kv_heads": 1, "intermediate_size": 10,
                              "sliding_window": 5, "block_size": 4, "feature_layers": (3, 4, 5), "v4": of}
    return replace(SHAPE, **(values | changes))


def v4_drafter(dtype: torch.dtype = torch.float64, of: DrafterShape | None = None, **options: Any) -> V4Drafter:
    """Weights large enough that every part matters: mHC projections of 0.2, bases, sinks and biases that are not 0."""
    model: Any = drafter(of or v4_shape(), dtype, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "hc_" in name or name.endswith("attn_sink"):
                wide = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(wide * (0.2 if name.endswith("fn") else 0.7))
            if name.endswith("wkv.weight") or "wq_" in name:
                parameter.mul_(2.0)
        for gate in model.gates:
            gate.bias.copy_(torch.randn(gate.bias.shape, generator=generator) * 0.3)
    return model


def rms(states: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return states / (states.square().mean() + eps).sqrt() * weight


class Reference:
    """One block at a time, one slot, head and expert after the other. ``mutant`` names what is done wrong."""

    def __init__(self, model: V4Drafter, mutant: str = "") -> None:
        assert model.shape.v4 is not None
        self.shape, self.of, self.mutant = model.shape, model.shape.v4, mutant
        self.eps = model.shape.rms_norm_eps
        self.own = {name: value.detach().double() for name, value in model.tensors().items()}
        self.embed, self.head = model.shared.embed.double(), model.shared.lm_head.double()

    def rotated(self, row: Tensor, position: int) -> Tensor:
        width, row = self.of.rope_head_dim, row.clone()
        start = 0 if self.mutant == "rope_first_channels" else len(row) - width
        for pair in range(width // 2):
            angle = torch.tensor(position / self.shape.rope_theta ** (2 * pair / width), dtype=torch.float64)
            first, second = start + 2 * pair, start + 2 * pair + 1
            if self.mutant == "rope_halves":
                first, second = start + pair, start + pair + width // 2
            a, b = row[first].clone(), row[second].clone()
            row[first] = a * angle.cos() - b * angle.sin()
            row[second] = a * angle.sin() + b * angle.cos()
        return row

    def site(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        count, eps = self.of.hc_mult, self.of.hc_eps
        m = self.own[f"{name}_fn"] @ rms(streams.flatten(), 1.0, self.eps)
        scale, base = self.own[f"{name}_scale"], self.own[f"{name}_base"]
        pre = torch.sigmoid(scale[0] * m[:count] + base[:count]) + eps
        post = torch.sigmoid(scale[1] * m[count:2 * count] + base[count:2 * count])
        post = post if self.mutant == "post_without_2" else 2 * post
        comb = torch.softmax((scale[2] * m[2 * count:] + base[2 * count:]).view(count, count), dim=1) + eps
        first, second = (1, 0) if self.mutant == "sinkhorn_rows_first" else (0, 1)
        comb = comb / (comb.sum(first, keepdim=True) + eps)
        for _ in range(self.of.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(second, keepdim=True) + eps)
            comb = comb / (comb.sum(first, keepdim=True) + eps)
        return pre, post, comb

    def mixed(self, streams: Tensor, branch: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        result = torch.zeros_like(streams)
        for k in range(len(streams)):
            for j in range(len(streams)):
                weight = comb[k, j] if self.mutant == "transposed_comb" else comb[j, k]
                result[k] += weight * streams[j]
            result[k] += post[k] * branch
        return result

    def kv(self, prefix: str, states: Tensor, position: int) -> Tensor:
        row = rms(self.own[f"{prefix}attn.wkv.weight"] @ states, self.own[f"{prefix}attn.kv_norm.weight"], self.eps)
        return self.rotated(row, position)

    def attended(self, prefix: str, normed: list[Tensor], anchor: int, context: list[Tensor]) -> list[Tensor]:
        """Branch outputs of the slots, from their normed inputs; ``context`` are main_x of the positions before."""
        own, heads, width = self.own, self.shape.num_heads, self.shape.head_dim
        window = self.shape.sliding_window + {"window+1": 1, "window-1": -1}.get(self.mutant, 0)
        shift = {"position+1": 1, "position-1": -1}.get(self.mutant, 0)
        found = []
        for slot, states in enumerate(normed):
            place = anchor + slot + shift
            first = max(0, anchor - window + (slot + 1 if self.mutant == "window_per_slot" else 0))
            inputs = {q: context[q] for q in range(first, anchor)}
            if self.mutant == "context_norm":
                inputs = {q: rms(x, own[f"{prefix}attn_norm.weight"], self.eps) for q, x in inputs.items()}
            rows = [self.kv(prefix, x, q) for q, x in inputs.items()]
            rows += [self.kv(prefix, other, anchor + index + shift) for index, other in enumerate(normed)
                     if index <= slot or self.mutant != "causal_block"]
            low = rms(own[f"{prefix}attn.wq_a.weight"] @ states, own[f"{prefix}attn.q_norm.weight"], self.eps)
            queries = (own[f"{prefix}attn.wq_b.weight"] @ low).view(heads, width)
            outputs = []
            for head in range(heads):
                query = queries[head] if self.mutant == "no_head_norm" else rms(queries[head], 1.0, self.eps)
                query = self.rotated(query, place)
                weights = torch.stack([query @ row * width ** -0.5 for row in rows]).exp()
                sink = 0.0 if self.mutant == "no_sink" else own[f"{prefix}attn.attn_sink"][head].exp()
                out = sum(weight * row for weight, row in zip(weights, rows)) / (weights.sum() + sink)
                outputs.append(out if self.mutant == "no_inverse_rope" else self.rotated(out, -place))
            groups = torch.cat(outputs).view(self.of.o_groups, -1)
            matrices = own[f"{prefix}attn.wo_a.weight"].view(self.of.o_groups, self.of.o_lora_rank, -1)
            low = torch.cat([matrix @ group for matrix, group in zip(matrices, groups)])
            found.append(own[f"{prefix}attn.wo_b.weight"] @ low)
        return found

    def expert(self, w1: Tensor, w2: Tensor, w3: Tensor, states: Tensor) -> Tensor:
        gate, up, limit = w1 @ states, w3 @ states, self.of.swiglu_limit
        if self.mutant != "unclamped":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return w2 @ (gate * torch.sigmoid(gate) * up)

    def experts(self, prefix: str, states: Tensor) -> Tensor:
        own = {name.removeprefix(f"{prefix}ffn."): value for name, value in self.own.items()}
        scores = (1 + (own["gate.weight"] @ states).exp()).log().sqrt()
        ranked = scores + own["gate.bias"]
        chosen = sorted(range(self.of.num_experts), key=lambda e: -float(ranked[e]))[:self.of.experts_per_token]
        weights = {e: (ranked if self.mutant == "bias_in_weights" else scores)[e] for e in chosen}
        total = 1.0 if self.mutant == "unnormalised_weights" else sum(weights.values())
        shared = self.expert(*(own[f"shared_experts.w{i}.weight"] for i in (1, 2, 3)), states)
        result = shared * (self.of.routed_scaling_factor if self.mutant == "scaled_shared_expert" else 1.0)
        for e, weight in weights.items():
            routed = self.expert(*(own[f"experts.w{i}"][e] for i in (1, 2, 3)), states)
            result = result + routed * weight / total * self.of.routed_scaling_factor
        return result

    def block(self, features: Tensor, ids: Tensor, anchor: int) -> Tensor:
        """h_k [S, D] of the block at ``anchor`` of a document with features [T, M*D]."""
        main = [rms(self.own["main_proj.weight"] @ features[q], self.own["main_norm.weight"], self.eps)
                for q in range(anchor)]
        tokens = [int(ids[anchor])] + [self.shape.mask_token_id] * (self.shape.block_size - 1)
        streams = [self.embed[token].repeat(self.of.hc_mult, 1) for token in tokens]
        for index in range(self.shape.num_layers):
            prefix = f"layers.{index}."
            sites = [self.site(x, f"{prefix}hc_attn") for x in streams]
            normed = [rms(pre @ x, self.own[f"{prefix}attn_norm.weight"], self.eps)
                      for x, (pre, _, _) in zip(streams, sites)]
            branches = self.attended(prefix, normed, anchor, main)
            streams = [self.mixed(x, y, post, comb) for x, y, (_, post, comb) in zip(streams, branches, sites)]
            for slot, x in enumerate(streams):
                pre, post, comb = self.site(x, f"{prefix}hc_ffn")
                normed_x = rms(pre @ x, self.own[f"{prefix}ffn_norm.weight"], self.eps)
                streams[slot] = self.mixed(x, self.experts(prefix, normed_x), post, comb)
        found = []
        for x in streams:
            m = self.own["hc_head.fn"] @ rms(x.flatten(), 1.0, self.eps)
            weights = torch.sigmoid(self.own["hc_head.scale"] * m + self.own["hc_head.base"]) + self.of.hc_eps
            found.append(x.mean(dim=0) if self.mutant == "mean_at_the_end" else weights @ x)
        return torch.stack(found)

    def logits(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """U_k + B_k [S, V] and the confidence's logits [S] of h_k [S, D] after the tokens ``previous`` [S]."""
        own, draft, confidence = self.own, [], []
        for h, token in zip(hidden, previous.tolist()):
            embedded = own["markov_head.markov_w1.weight"][token]
            normed = rms(h, own["norm.weight"], self.eps)
            draft.append(self.head @ normed + own["markov_head.markov_w2.weight"] @ embedded)
            read = normed if self.mutant == "norm_before_confidence" else h
            confidence.append(own["confidence_head.proj.weight"][0] @ torch.cat((read, embedded)))
        return torch.stack(draft), torch.stack(confidence)
