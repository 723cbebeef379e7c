"""Options of a target that can be judged once its sizes are known."""

from typing import Optional, Sequence

from deepspec.errors import ConfigError


def check_layers(layers: Sequence[int], num_layers: int, name: str, *, last: bool = False) -> tuple[int, ...]:
    """``target.feature_layers`` as a tuple. Raises ConfigError for ids that no engine can capture or that repeat.

    ``last``: engines can capture the last layer of this family beside others.
    """
    chosen = tuple(int(layer) for layer in layers)
    for layer in chosen:
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"target.feature_layers={list(chosen)}: {layer} is not a decoder layer of {name}, which has "
                f"{num_layers} layers. Use ids from 0 to {num_layers - 2}; id i is the output of layer i."
            )
    if num_layers - 1 in chosen and len(chosen) > 1 and not last:
        raise ConfigError(
            f"target.feature_layers={list(chosen)}: layer {num_layers - 1} is the last of {name}'s {num_layers} "
            f"layers, whose output serving engines cannot capture beside others. Use ids from 0 to {num_layers - 2}."
        )
    if list(chosen) != sorted(set(chosen)):
        raise ConfigError(f"target.feature_layers={list(chosen)} must be ascending, without repetition. "
                          f"Write {sorted(set(chosen))}.")
    return chosen


def check_mask(mask_token_id: Optional[int], rows: int, name: str) -> Optional[int]:
    """``target.mask_token_id``. Raises ConfigError where the embedding has no such row."""
    if mask_token_id is not None and not 0 <= mask_token_id < rows:
        raise ConfigError(
            f"target.mask_token_id={mask_token_id} is not a row of {name}'s embedding, which has {rows} rows. Give "
            "the id of a special token that text never contains, or of a padding row."
        )
    return mask_token_id
