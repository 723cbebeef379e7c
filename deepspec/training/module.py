"""The one module the engine wraps: under ZeRO-3 a parameter used outside the wrapped forward is an empty tensor."""

from typing import Optional

from torch import Tensor, nn

from deepspec.config.schema import ObjectiveConfig
from deepspec.data.batch import TrainingBatch
from deepspec.drafters.base import Drafter
from deepspec.drafters.types import SharedWeights
from deepspec.objective import Denominators, drafter_loss


class TrainingModule(nn.Module):
    """Drafter and objective in one forward. The target's weights are plain tensors here: never trained or saved."""

    def __init__(self, drafter: Drafter, objective: ObjectiveConfig,
                 shared: Optional[SharedWeights] = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self.shared: SharedWeights = drafter.shared if shared is None else shared

    def forward(self, batch: TrainingBatch, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
        """This pack's share of the window's loss (Eq. 12): a scalar to differentiate, and detached sums.

        A plain tuple, because DeepSpeed hangs its backward hooks on tensors it finds in tuples and dicts only.
        """
        output = self.drafter(batch)
        terms = drafter_loss(output, batch, self.shared, self.objective, denominators, self.drafter.shape)
        # A loss that is not finite must poison the whole gradient, whatever path the bad value took: then every ZeRO
        # stage sees an invalid norm and skips the step. The factor is exactly 1 for a finite loss.
        return terms.loss * (1.0 + 0.0 * terms.loss.detach()), {**terms.sums, **output.sums}
