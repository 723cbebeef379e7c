"""Options of a command line that the chosen drafter does not read: set without effect, they would mislead.

Only what somebody typed is judged. Experiments and presets set options for whichever algorithm is chosen on top of
them, and values that an algorithm reads but does not take are refused by planning/validate.py.
"""

from typing import Sequence

from hydra.core.override_parser.types import Override

from deepspec.config.schema_drafter import ALGORITHMS, WITH_HEADS
from deepspec.errors import ConfigError

_READERS: dict[str, tuple[str, ...]] = {
    "drafter.num_layers": ("dspark", "dspark_v4", "dflash", "medusa"),
    "drafter.markov_rank": WITH_HEADS,
    "drafter.confidence_with_markov": WITH_HEADS,
    "drafter.intermediate_size": tuple(name for name in ALGORITHMS if name != "medusa"),
}
_INSTEAD = {
    "drafter.num_layers": "is a single layer",
    "drafter.markov_rank": "has no sequential head",
    "drafter.confidence_with_markov": "has no confidence head",
    "drafter.intermediate_size": "has no MLP",
}


def refuse_unread(given: Sequence[Override], algorithms: Sequence[str]) -> None:
    """Raises ConfigError for an option in ``given`` without a reader among the ``algorithms`` of the job or sweep.

    With several algorithms an option of one value may be meant for some of them; one that is itself swept would train
    the others several times over, all alike, so each has to read it.
    """
    for item in given:
        readers = _READERS.get(item.key_or_group)
        if readers is None:
            continue
        deaf = [name for name in algorithms if name in ALGORITHMS and name not in readers]
        if not deaf or (len(deaf) < len(algorithms) and not item.is_sweep_override()):
            continue
        sets = f"sweeps {item.key_or_group}" if item.is_sweep_override() else f"sets {item.key_or_group}"
        raise ConfigError(
            f"{item.input_line} {sets}, which drafter.algorithm={deaf[0]} does not read: it "
            f"{_INSTEAD[item.key_or_group]}. Leave it out, or use it with one of {', '.join(readers)}.")
