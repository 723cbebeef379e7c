"""How large a pack gets and how many a step needs, from the options and the expected length of a sample."""

import math
from dataclasses import dataclass

from deepspec.config.schema import Config
from deepspec.planning.ranks import trainer_ranks
from deepspec.planning.samples import SampleLength


@dataclass(frozen=True)
class PackPlan:
    """Packs of one rank."""

    tokens: int  # of the largest pack
    anchors: int  # blocks of the largest pack
    per_step: int  # forwards and backwards of a rank in an optimizer step
    padding_tokens: float  # of all ranks in a step, with pad_packs
    padding_anchors: float

    @property
    def text(self) -> str:
        """For example ``12 packs per rank and step, up to 8,192 tokens and 4,096 blocks each``."""
        return (f"{self.per_step:,} packs per rank and step, up to {self.tokens:,} tokens and {self.anchors:,} blocks "
                "each")


def plan_packs(config: Config, length: SampleLength) -> PackPlan:
    """Packs of samples of the expected length; memory is planned for the largest, time for the sum."""
    trainer, world = config.trainer, trainer_ranks(config)
    tokens, anchors = length.tokens, min(trainer.num_anchors, length.answer)
    if trainer.pack_tokens is None:
        most = min(trainer.num_anchors, int(tokens)) * trainer.micro_batch_size
        per_step = math.ceil(math.ceil(trainer.global_batch_size / world) / trainer.micro_batch_size)
        return PackPlan(trainer.micro_batch_size * int(tokens), most, per_step, 0.0, 0.0)
    together = trainer.pack_tokens / max(1.0, tokens)
    if trainer.pack_anchors is None:
        most = int(together * min(trainer.num_anchors, tokens))
    else:
        most = trainer.pack_anchors
        together = min(together, trainer.pack_anchors / max(1.0, anchors))
    per_step = math.ceil(trainer.global_batch_size / max(1.0, together) / world)
    if not trainer.pad_packs:
        return PackPlan(trainer.pack_tokens, most, per_step, 0.0, 0.0)
    packs, samples = per_step * world, trainer.global_batch_size
    return PackPlan(trainer.pack_tokens, most, per_step, max(0.0, packs * trainer.pack_tokens - samples * tokens),
                    max(0.0, packs * most - samples * anchors))
