"""What calibration is made from: per drafted block the raw confidence and what the target decided.

n blocks, K draft positions, F inputs of the confidence head.
"""

import hashlib
import io
import json
import zipfile
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from deepspec.artifacts import atomic_write_bytes
from deepspec.errors import InputRefused

_ARRAYS = ("logits", "accepted", "drafted", "analytic_rate", "conversation", "domain")


@dataclass(frozen=True)
class RecordsOrigin:
    """How records were made; calibration refuses records of another origin."""

    block_length: int  # draft tokens per block, K
    drafter_sha256: str
    sampling_temperature: float  # of drafting and verification
    temperatures: tuple[float, ...]  # applied to the stored logits; must be all 1
    confidence_head: str = "joint"  # joint | refit
    thinking: Optional[bool] = None  # what target.thinking said when the prompts were rendered
    # full: every draft token went to the target | scheduled: lengths were chosen by confidence, which biases any fit
    verification: str = "full"
    fold: tuple[float, float] = (1.0, 0.0)  # temperature and shift in the head's weights; undone before anything is fit
    source: str = "deepspec"  # deepspec | sglang | another name of where they were recorded


@dataclass(frozen=True)
class ConfidenceRecords:
    """Confidence logits and outcomes of blocks the drafter drafted itself, every draft token sent to the target.

    ``analytic_rate[i, k]`` is ``1 - 0.5 |p_d - p_t|_1`` (Eq. 8) at the prefix that was drafted, NaN where unknown.
    ``drafted[i]`` counts the positions whose outcome is known (less than K when the token budget ended the answer).
    ``inputs`` [n, K, F] (the head's input) is only kept in memory for the refit, never saved.
    """

    origin: RecordsOrigin
    logits: NDArray[np.float32]  # [n, K] before the sigmoid of Eq. 7, temperature 1
    accepted: NDArray[np.int64]  # [n] accepted draft tokens, 0..drafted
    drafted: NDArray[np.int64]  # [n]
    analytic_rate: NDArray[np.float32]  # [n, K]
    conversation: NDArray[np.str_]  # [n] prompt id; splits never cut one
    domain: NDArray[np.str_]  # [n]
    inputs: Optional[NDArray[np.float16]] = None

    def __post_init__(self) -> None:
        count, length = len(self.logits), self.origin.block_length
        expected = {"logits": (count, length), "analytic_rate": (count, length)}
        for name in _ARRAYS:
            shape = getattr(self, name).shape
            if shape != expected.get(name, (count,)):
                raise InputRefused(f"confidence records: {name} has shape {shape}, expected "
                                   f"{expected.get(name, (count,))} for {count} blocks of {length} draft tokens. "
                                   "Make them again with launch/fit_confidence.py.")
        if not np.isfinite(self.logits).all():
            raise InputRefused("confidence records: logits contain values that are not finite; the drafter diverged or "
                               "its checkpoint is damaged. Train it again or choose an earlier checkpoint.")

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def known(self) -> NDArray[np.bool_]:
        """[n, K]: whether the outcome of the position is known."""
        return self.drafted[:, None] > np.arange(self.origin.block_length)

    @property
    def reached(self) -> NDArray[np.bool_]:
        """[n, K]: known, and everything before the position was accepted: what Eq. 7 conditions on."""
        return self.known & (self.accepted[:, None] >= np.arange(self.origin.block_length))

    @property
    def survived(self) -> NDArray[np.bool_]:
        """[n, K]: the block survived through the position (its token and all before it accepted)."""
        return self.accepted[:, None] > np.arange(self.origin.block_length)

    def select(self, rows: NDArray[Any]) -> "ConfidenceRecords":
        """The blocks named by a mask or indices [n]."""
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return replace(self, **arrays, inputs=None if self.inputs is None else self.inputs[rows])

    def with_logits(self, logits: NDArray[Any], confidence_head: str) -> "ConfidenceRecords":
        """The same blocks scored by another confidence head."""
        origin = replace(self.origin, confidence_head=confidence_head)
        return replace(self, origin=origin, logits=np.asarray(logits, dtype=np.float32))

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything but ``inputs`` as one npz, atomically."""
        buffer = io.BytesIO()
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez_compressed(buffer, origin=np.array(json.dumps(asdict(self.origin))), **arrays)
        atomic_write_bytes(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | PathLike[str], *, unfold: bool = False, **expected: Any) -> "ConfidenceRecords":
        """Read ``save``'s file. ``expected`` names fields of ``RecordsOrigin`` and the values they must have.

        ``unfold`` lets logits of a folded head pass, for a caller that undoes the fold. A field that files of an
        earlier version do not hold is not compared.

        Raises:
            InputRefused: the file is missing or unreadable, was made with temperatures other than 1, or a field
                differs from what is expected; the message names the field and both values.
        """
        again = "Make them again with launch/fit_confidence.py."
        try:
            with np.load(Path(path), allow_pickle=False) as stored:
                values = {name: stored[name] for name in _ARRAYS}
                header = json.loads(str(stored["origin"]))
                origin = origin_from(header)
        except FileNotFoundError:
            raise InputRefused(f"confidence records not found: {path}. {again}") from None
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise InputRefused(f"{path} is not a file of confidence records ({error}). {again}") from None
        given = {name: value for name, value in expected.items() if name in header}
        refuse_origin(replace(origin, fold=(1.0, 0.0)) if unfold else origin, given, str(path), again)
        return cls(origin=origin, **values)

    @classmethod
    def concatenate(cls, parts: list["ConfidenceRecords"]) -> "ConfidenceRecords":
        """All blocks of ``parts`` (same origin) in order."""
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        inputs = None
        if all(part.inputs is not None for part in parts):
            inputs = np.concatenate([part.inputs for part in parts])
        return cls(origin=parts[0].origin, inputs=inputs, **arrays)


def origin_from(values: Mapping[str, Any]) -> RecordsOrigin:
    """The origin as a file holds it (lists for tuples). Raises KeyError, TypeError or ValueError for what is none."""
    length, fold = values["block_length"], values.get("fold", (1.0, 0.0))
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
        raise ValueError(f"block_length={length!r} is not a whole number of at least 1")
    if len(fold) != 2 or not np.isfinite(np.asarray(fold, dtype=float)).all() or float(fold[0]) <= 0:
        raise ValueError(f"fold={fold!r} is not a temperature above 0 and a shift")
    tuples = {name: tuple(map(float, values[name])) for name in ("temperatures", "fold") if name in values}
    return RecordsOrigin(**dict(values) | tuples)


def refuse_origin(origin: RecordsOrigin, expected: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise InputRefused naming the field when records of ``origin`` would bias a fit or are of something else."""
    needed = {"temperatures": (1.0,) * origin.block_length, "verification": "full", "fold": (1.0, 0.0)} | dict(expected)
    why = {"temperatures": "a temperature was applied to their logits already",
           "verification": "a scheduler chose which draft tokens were verified by the very confidence that is to be "
                           "judged",
           "fold": "the logits are those of a head with a folded calibration"}
    for name, value in needed.items():
        if getattr(origin, name) != value:
            reason = why.get(name, "these records were made by another drafter or with other settings")
            raise InputRefused(f"{where}: {name} is {getattr(origin, name)!r}, needed is {value!r}: {reason}. {remedy}")


def _order_key(conversation: str) -> str:
    return hashlib.sha256(f"calibration split:{conversation}".encode()).hexdigest()


def balanced_order(conversation: Sequence[str], domain: Sequence[str]) -> list[str]:
    """Distinct conversations in an order that depends on their ids only (by hash) and is even over the domains."""
    domains: dict[str, list[str]] = {}
    for name, group in sorted(set(zip(conversation, domain))):
        domains.setdefault(group, []).append(name)
    ranked = []
    for names in domains.values():
        for place, name in enumerate(sorted(set(names), key=_order_key)):
            ranked.append(((place + 0.5) / len(names), _order_key(name), name))
    return list(dict.fromkeys(name for _, _, name in sorted(ranked)))


def split_conversations(conversation: NDArray[np.str_], domain: NDArray[np.str_], *, refit_fraction: float,
                        fit_fraction: float) -> NDArray[np.str_]:
    """Part of every block, "refit", "fit" or "report" [n]; all blocks of a conversation are in one part.

    Conversations are put in ``balanced_order`` and cut at ``refit_fraction`` and then at ``fit_fraction`` of the rest,
    so that each domain is in each part where it has enough conversations. With two conversations or more, fit and
    report both get at least one.
    """
    order = balanced_order(conversation.tolist(), domain.tolist())
    total = len(order)
    refit = min(round(refit_fraction * total), max(0, total - 2))
    if refit_fraction > 0 and total >= 3:
        refit = max(1, refit)
    rest = total - refit
    fit = min(max(1, round(fit_fraction * rest)), max(0, rest - 1)) if rest > 1 else rest
    part = {name: "refit" if i < refit else "fit" if i < refit + fit else "report" for i, name in enumerate(order)}
    return np.array([part[name] for name in conversation.tolist()], dtype="U6")
