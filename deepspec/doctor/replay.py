"""What a drafter would have accepted on a known text: the rounds of greedy decoding without the target's forwards.

At temperature 0 verification accepts a draft token when it is the next token of the text, so features and text decide
every round. K draft tokens, D width, M feature layers.
"""

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from deepspec.decoding.recurrent import draft_state
from deepspec.doctor.counts import Counts, PromptCounts
from deepspec.doctor.reference import Text
from deepspec.targets.sampling import Sampling


@dataclass(frozen=True)
class Variant:
    """A drafter as some engine might run it: which layers feed it, and whether it sees the prompt's features."""

    drafter: Any
    layers: tuple[int, ...]
    prompt_context: bool = True


@dataclass
class _Row:
    text: Text
    features: Tensor  # [T, M*D]
    anchor: int
    rounds: int
    accepted: list[int]
    kept: list[int] = field(default_factory=list)  # of every round

    @property
    def open(self) -> bool:
        """Whether another round follows: the answer is not complete, and the text goes on far enough to judge it."""
        made = self.anchor + 1 - len(self.text.prompt)
        return made < len(self.text.answer) and self.anchor + len(self.accepted) < len(self.text.ids)


def _features(variant: Variant, text: Text, states: Mapping[int, Tensor]) -> Tensor:
    features = torch.cat([states[layer] for layer in variant.layers], dim=-1)
    if not variant.prompt_context:
        features = features.clone()
        features[:len(text.prompt)] = 0.0
    return features


def _open(variant: Variant, texts: Sequence[Text], states: Sequence[Mapping[int, Tensor]],
          tokenizer_size: int) -> tuple[Any, list[_Row]]:
    """The drafter's state and the rows after the prefill of every prompt."""
    length = variant.drafter.shape.draft_length
    drafts = draft_state(variant.drafter, len(texts), tokenizer_size=tokenizer_size,
                         capacity=max(len(text.ids) for text in texts))
    rows = []
    for place, text in enumerate(texts):
        row = _Row(text, _features(variant, text, states[place]), len(text.prompt), 0, [0] * length)
        drafts.append(place, row.features[:row.anchor], text.ids[1:row.anchor + 1])
        rows.append(row)
    return drafts, rows


def _propose(drafts: Any, rows: Sequence[_Row], places: Sequence[int]) -> list[list[int]]:
    """Greedy drafts of the rows at ``places`` after their anchors."""
    anchors = [rows[place].text.ids[rows[place].anchor] for place in places]
    uniforms = torch.zeros(len(places), drafts.length)
    drafted: list[list[int]] = drafts.propose(places, anchors, uniforms, Sampling(temperature=0.0)).ids.tolist()
    return drafted


@torch.no_grad()
def first_drafts(variant: Variant, texts: Sequence[Text], states: Sequence[Mapping[int, Tensor]],
                 tokenizer_size: int) -> list[list[int]]:
    """What ``variant`` drafts after the first token of every answer: K tokens per text."""
    drafts, rows = _open(variant, texts, states, tokenizer_size)
    return _propose(drafts, rows, range(len(rows)))


@torch.no_grad()
def _rounds(variant: Variant, texts: Sequence[Text], states: Sequence[Mapping[int, Tensor]],
            tokenizer_size: int) -> list[_Row]:
    """The rows of ``texts`` after all their rounds."""
    length = variant.drafter.shape.draft_length
    drafts, rows = _open(variant, texts, states, tokenizer_size)
    while True:
        alive = [place for place, row in enumerate(rows) if row.open]
        if not alive:
            return rows
        for place, drafted in zip(alive, _propose(drafts, rows, alive)):
            row = rows[place]
            following = row.text.ids[row.anchor + 1:row.anchor + 1 + length]
            kept = 0
            while kept < len(following) and drafted[kept] == following[kept]:
                row.accepted[kept] += 1
                kept += 1
            row.rounds += 1
            row.kept.append(kept)
            end = row.anchor + kept + 1
            drafts.append(place, row.features[row.anchor:end], row.text.ids[row.anchor + 1:end + 1])
            row.anchor = end


def accepted_by_round(variant: Variant, texts: Sequence[Text], states: Sequence[Mapping[int, Tensor]],
                      tokenizer_size: int) -> list[list[int]]:
    """Accepted draft tokens of every round of every text, in order."""
    return [row.kept for row in _rounds(variant, texts, states, tokenizer_size)]


def replay(variant: Variant, texts: Sequence[Text], states: Sequence[Mapping[int, Tensor]],
           tokenizer_size: int) -> Counts:
    """Greedy rounds of ``variant`` over ``texts``, all texts together; ``states``: layer outputs per text.

    The first token of an answer comes from the prefill, as in an engine. A last round that the text is too short to
    judge is left out.
    """
    length = variant.drafter.shape.draft_length
    rows = _rounds(variant, texts, states, tokenizer_size)
    return Counts(tuple(PromptCounts(row.rounds, row.rounds * length, sum(row.accepted), tuple(row.accepted))
                        for row in rows))
