"""One optimizer window as a rank sees it: its denominators first (cheap), then its packs one after the other.

The denominators of the exact weighted mean are sums over the whole window, so they must be known before the first
backward. They depend on loss masks alone, so no hidden state is held longer than its own micro-step.
"""

from dataclasses import dataclass, fields, replace
from typing import Callable, Iterator, Optional, Sequence

import torch

from deepspec import distributed
from deepspec.config.schema import ObjectiveConfig, TrainerConfig
from deepspec.data.anchors import build_blocks, sample_anchors, valid_anchors
from deepspec.data.batch import AnchorBlocks, Sample, TrainingBatch
from deepspec.data.collate import collate
from deepspec.data.order import MicroStep, micro_steps
from deepspec.data.packing import PackItem, PackLimits, pack_window, worst_pack, worst_size
from deepspec.data.padding import pad, weightless_blocks
from deepspec.data.sources import CachedFeatures, FeatureSource, OnlineFeatures
from deepspec.drafters.types import DrafterShape
from deepspec.objective import Denominators, window_weights

Source = FeatureSource | CachedFeatures | OnlineFeatures


def stand_in(shape: DrafterShape, dtype: torch.dtype = torch.float32) -> TrainingBatch:
    """The smallest pack that runs every collective and has weight 0: one token, one block, nothing supervised."""
    width = len(shape.feature_layers) * shape.target_hidden_size
    return TrainingBatch(
        sample_ids=(),
        input_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, dtype=torch.int64),
        document_starts=(0, 1),
        features=torch.zeros(1, width, dtype=dtype),
        last_hidden=torch.zeros(1, shape.target_hidden_size, dtype=dtype),
        blocks=weightless_blocks(1, 0, torch.zeros(1, dtype=torch.int64), shape.trained_length),
    )


def never_empty(batch: TrainingBatch, draft_length: int) -> TrainingBatch:
    """``batch``, or with one unsupervised block when it has none: every parameter then gets an exact zero gradient in
    the same order as on the other ranks, which ZeRO's bucketed reductions rely on."""
    if len(batch.blocks):
        return batch
    return replace(batch, blocks=weightless_blocks(1, 0, batch.input_ids[:1], draft_length))


def _map_tensors(batch: TrainingBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainingBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    if batch.states is not None:
        values["states"] = batch.states.map(change)
    blocks = {f.name: change(getattr(batch.blocks, f.name)) for f in fields(batch.blocks)}
    values = {name: change(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    return TrainingBatch(**(values | {"blocks": AnchorBlocks(**blocks)}))


def to_device(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    """``batch`` with every tensor on ``device``, and hidden states decoded there."""
    if device.type != "cpu":
        batch = _map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
    if batch.states is None:
        return batch
    features, last_hidden = batch.states.features.decode(), batch.states.last_hidden.decode()
    return replace(batch, features=features, last_hidden=last_hidden, states=None)


def pinned(batch: TrainingBatch) -> TrainingBatch:
    """``batch`` with its CPU tensors in page-locked memory, from where a GPU fetches them while it computes."""
    return _map_tensors(batch, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)


@dataclass(frozen=True)
class Window:
    """This rank's part of one optimizer step."""

    epoch: int
    indices: tuple[int, ...]  # of all ranks
    steps: tuple[MicroStep, ...]  # of this rank; equally many on every rank


class KnownMasks(Sequence[Sample]):
    """Loss masks of a source that cannot give a sample without its hidden states; each is read once and kept.

    The samples have their id, domain, length and mask, but no token ids.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        if index not in self._known:
            sample = self._source.get([index])[0].sample
            no_ids = torch.zeros((), dtype=torch.int64).expand(len(sample.loss_mask))
            self._known[index] = Sample(sample.sample_id, sample.domain, no_ids, sample.loss_mask.cpu())
        return self._known[index]


class Packer:
    """Turns windows into packs; anchors are drawn from (seed, epoch, sample id) and nothing else.

    ``documents`` are the source's samples without hidden states, in the same order, where they are at hand.
    ``num_workers`` is for loading.py: so many packs wait in a thread of its own; 0 makes none ahead.
    """

    def __init__(self, source: Source, shape: DrafterShape, trainer: TrainerConfig, objective: ObjectiveConfig,
                 *, seed: int, num_workers: int = 0, documents: Optional[Sequence[Sample]] = None) -> None:
        self.source, self.shape, self.trainer, self.objective = source, shape, trainer, objective
        self.seed, self.num_workers = seed, num_workers
        known = getattr(source, "documents", None) if documents is None else documents
        self._documents: Sequence[Sample] = KnownMasks(source) if known is None else known
        self.limits: Optional[PackLimits] = None
        if trainer.pack_tokens is not None:
            self.limits = PackLimits(trainer.pack_tokens, trainer.pack_anchors, shape.block_size)

    def window(self, indices: Sequence[int], epoch: int) -> Window:
        """Share of this rank in the window of ``indices``. Raises InputRefused for a sample larger than a pack."""
        rank, world = distributed.rank(), distributed.world_size()
        if self.limits is None:
            steps = micro_steps(list(indices), rank=rank, world_size=world,
                                micro_batch_size=self.trainer.micro_batch_size)
        else:
            steps = pack_window([self._item(index) for index in indices], self.limits, world)[rank]
        return Window(epoch, tuple(indices), tuple(steps))

    def weights(self, window: Window) -> Denominators:
        """Sums of loss weights of this rank's samples; add over ranks for the denominators."""
        total = Denominators(0.0, 0.0, 0.0)
        for step in window.steps:
            if step.weightless:
                continue
            samples = [self._documents[index] for index in step.indices]
            anchors = [
                sample_anchors(sample.loss_mask, self.trainer.num_anchors, seed=self.seed, epoch=window.epoch,
                               sample_id=sample.sample_id)
                for sample in samples
            ]
            blocks = build_blocks(samples, anchors, self.shape.trained_length)
            part = window_weights(blocks, self.objective, self.shape.trained_length)
            total = Denominators(total.ce + part.ce, total.tv + part.tv, total.confidence + part.confidence)
        return total

    def announce(self, steps: Sequence[MicroStep]) -> None:
        """Tell a source that wants to know which packs ``pack`` will be asked for next."""
        if hasattr(self.source, "announce"):
            for step in steps:
                if not step.weightless:
                    self.source.announce(step.indices)

    def packs(self, window: Window) -> Iterator[TrainingBatch]:
        """The packs of this rank in order."""
        return (self.pack(step, window.epoch) for step in window.steps)

    def pack(self, step: MicroStep, epoch: int) -> TrainingBatch:
        """One pack on the CPU (or where the source computes its features); for a GPU, stored states stay encoded."""
        if step.weightless:
            return self.stand_in()
        read = getattr(self.source, "get_stored", self.source.get)
        batch = collate(
            read(list(step.indices)), num_anchors=self.trainer.num_anchors, draft_length=self.shape.trained_length,
            seed=self.seed, epoch=epoch, decode=distributed.device().type == "cpu",
        )
        return self._padded(never_empty(batch, self.shape.trained_length))

    def stand_in(self) -> TrainingBatch:
        """A pack of weight 0, of the size of the others where that is fixed."""
        return self._padded(stand_in(self.shape))

    def largest(self) -> TrainingBatch:
        """A pack at least as large as any of training, in tokens and in blocks: the most memory a step will ask for.

        Its samples are the costliest that go together; what the bounds allow beyond them is padding.
        """
        items = [self._item(index, look=False) for index in range(len(self.source.samples))]
        if self.limits is None:
            count, cost = self.trainer.micro_batch_size, PackLimits(0, None, self.shape.block_size).cost
            indices = tuple(i.index for i in sorted(items, key=lambda i: cost(i.tokens, i.anchors))[-count:])
            tokens, blocks = (sum(sorted(sizes)[-count:]) for sizes in zip(*((i.tokens, i.anchors) for i in items)))
        else:
            indices = worst_pack(items, self.limits)
            tokens, blocks = worst_size(items, self.limits)
        batch = self.pack(MicroStep(indices), epoch=0)
        return pad(batch, tokens=max(tokens, len(batch.input_ids)), blocks=max(blocks, len(batch.blocks)))

    def _item(self, index: int, look: bool = True) -> PackItem:
        """Size of a sample; ``look=False`` bounds the anchors where only the loss mask could tell them."""
        info = self.source.samples[index]
        anchors = info.anchors
        if anchors is None:
            anchors = len(valid_anchors(self._documents[index].loss_mask)) if look else max(0, info.length - 1)
        return PackItem(index, info.sample_id, info.length, min(anchors, self.trainer.num_anchors))

    def _padded(self, batch: TrainingBatch) -> TrainingBatch:
        if not self.trainer.pad_packs or self.limits is None or self.limits.anchors is None:
            return batch
        return pad(batch, tokens=self.limits.tokens, blocks=self.limits.anchors)
