"""The chunked pass with fused kernels on a chunk's logits: the same plan, chunks and products, see chunked.py.

Only what happens to the logits between the matrix products is replaced (kernels/slot_loss.py): softmax, both losses
and their gradient take three sweeps instead of a dozen, and need no scratch buffer.
"""

from torch import Tensor

from deepspec.kernels import slot_loss
from deepspec.objective.chunked import ChunkedPass


class TritonPass(ChunkedPass):
    """``slot_losses(..., kind=TritonPass)``: values and gradients of the chunked pass."""

    statistics: tuple[Tensor, Tensor]  # of the target rows of the chunk at hand

    def scratch_rows(self, most: int) -> int:
        """None: the kernel works in registers."""
        return 0

    def cap(self, logits: Tensor, slope: Tensor, softcap: float) -> None:
        """Cap in one read and at most two writes."""
        slot_loss.softcap_(logits, slope, softcap)

    def targets(self, target: Tensor) -> None:
        """Keep the target's logits; their statistics are all the losses need."""
        self.statistics = slot_loss.row_statistics(target)

    def elementwise(self, slots: slice, draft: Tensor, target: Tensor, bias: Tensor, scratch: Tensor) -> None:
        """Losses of the slots; afterwards ``draft`` holds the gradient by the logits, where one is wanted."""
        inputs, plan = self.inputs, self.inputs.plan
        slot_loss.slot_losses_(
            draft, bias, plan.group_of[slots] - plan.group_of[slots.start], target,
            plan.row_of[slots] - plan.row_of[slots.start], self.statistics, inputs.labels[slots],
            inputs.ce_scales[slots], inputs.tv_scales[slots], self.ce[slots], self.l1[slots], inputs.differentiate,
        )
