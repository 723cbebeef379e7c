"""SGLang's shards of confidence records: which files they are, and what each holds. n blocks, K positions.

``SGLANG_DSPARK_STS_COLLECT_PATH=STEM`` makes a server write ``STEM.0.pt``, ``STEM.1.pt``, ...; a folder may hold those
of several servers.
"""

import itertools
import logging
import pickle
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepspec.calibration.metrics import Floats
from deepspec.errors import InputRefused

logger = logging.getLogger(__name__)
Block = tuple[Floats, NDArray[np.bool_]]  # logits [n, K] and prefix_mask [n, K] of a shard


def _order(path: Path) -> tuple[str, int]:
    """Shards are STEM.NUMBER.pt, numbered in time."""
    found = re.fullmatch(r"(.*?)\.?(\d+)\.pt", path.name)
    return (found.group(1), int(found.group(2))) if found else (path.name, 0)


def shard_files(path: Path) -> list[Path]:
    """The shards that ``path`` means, in time per server: a folder of them, one of them, or the stem of their names."""
    if path.is_dir():
        return sorted(path.glob("*.pt"), key=_order)
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    if not path.parent.is_dir():
        return []
    named = (file for file in path.parent.iterdir() if file.suffix == ".pt" and _order(file)[0] == path.name)
    return sorted(named, key=_order)


def read_shards(files: list[Path]) -> list[Block]:
    """Content of ``files``, all of one width. One that is torn is left out if it is its server's last, which was being
    written when the server ended; any other raises InputRefused, and so do values that no drafter gives."""
    found: list[Block] = []
    for _, group in itertools.groupby(files, key=lambda file: _order(file)[0]):
        own = list(group)
        for file in own:
            try:
                block = _read(file)
            except _Torn as error:
                if file != own[-1] or len(files) == 1:
                    raise InputRefused(f"{file} is not a shard with logits and prefix_mask ({error}). If it was copied "
                                       "while it was written, copy it again; else move it away to go on without its "
                                       "blocks.") from None
                logger.warning("%s is torn and left out (%s): its server ended while it was written", file, error)
                continue
            if found and block[0].shape[1] != found[0][0].shape[1]:
                raise InputRefused(f"{file} has blocks of {block[0].shape[1]} draft tokens, the shards before it of "
                                   f"{found[0][0].shape[1]}: they are of different servers. Keep one server's shards "
                                   "in a folder.")
            found.append(block)
    if not sum(len(logits) for logits, _ in found):
        raise InputRefused(f"{files[0].parent} has shards, but no block in them. Let the server answer more requests: "
                           "it writes a shard every 256 steps.")
    return found


class _Torn(Exception):
    """A file that is no whole shard."""


def _read(file: Path) -> Block:
    import torch

    try:
        shard = torch.load(file, map_location="cpu", weights_only=True)
        logits, mask = shard["logits"].float().numpy(), shard["prefix_mask"].float().numpy()
    except (OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, EOFError,
            pickle.UnpicklingError) as error:  # torch tells a torn file in all of these ways
        # Torch goes on for a paragraph; its first sentence says what it is.
        raise _Torn(str(error).splitlines()[0].partition(". ")[0] if str(error) else type(error).__name__) from None
    if logits.ndim != 2 or logits.shape != mask.shape:
        raise InputRefused(f"{file}: logits {logits.shape} and prefix_mask {mask.shape} must be two equal tables, a "
                           "block a row. This is no file of SGLang's collector: move it away.")
    bad = ~np.isfinite(logits).all(axis=1)
    if bad.any():
        raise InputRefused(f"{file}: logits of block {int(bad.argmax())} are not finite ({int(bad.sum())} of "
                           f"{len(bad)} blocks). The served drafter overflows or is damaged: look into it with "
                           "launch/doctor.py before calibrating.")
    if not np.isin(mask, (0.0, 1.0)).all():
        raise InputRefused(f"{file}: prefix_mask holds values other than 0 and 1. This is no file of SGLang's "
                           "collector: move it away.")
    accepted = mask > 0.5
    if (accepted[:, 1:] & ~accepted[:, :-1]).any():
        row = int((accepted[:, 1:] & ~accepted[:, :-1]).any(axis=1).argmax())
        raise InputRefused(f"{file}: prefix_mask of block {row} accepts a token behind a rejected one. This is no file "
                           "of SGLang's collector: move it away.")
    return logits, accepted
