"""The served target's weights against those whose hidden states the drafter learned from."""

from typing import Optional

from deepspec.doctor.endpoint import ServerFacts
from deepspec.doctor.findings import NOTE, Finding
from deepspec.targets.quantization import folder_quantization, same_quantization


def check_quantization(facts: ServerFacts, learned: Optional[str]) -> list[Finding]:
    """A note where the server says, or the folder it loaded shows, that its weights are quantised in another way."""
    served = facts.quantization or folder_quantization(facts.target)
    if served is None or same_quantization(served, learned):
        return []
    return [Finding(
        "quantization", f"the server's target is {served}, the drafter learned from hidden states of "
        f"{learned or 'weights that are not quantised'}", "Train on features of the engine that serves "
        "(features.mode=server, features.server.quantization), or serve the weights it was trained on.", kind=NOTE,
        found_by="server")]
