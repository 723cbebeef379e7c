"""calibration.json: the temperatures, and on conversations the fit never saw what they change. K draft positions.

``fit.calibrate`` makes one.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.typing import ArrayLike

from deepspec.artifacts import atomic_write_json
from deepspec.calibration.fold import Fold
from deepspec.calibration.measure import Intervals, Values
from deepspec.calibration.methods import apply_maps
from deepspec.calibration.metrics import Floats, sigmoid
from deepspec.errors import InputRefused

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Content of calibration.json; per-position tuples have ``block_size`` entries.

    ``ece_*`` and ``brier_*`` are of the cumulative product ``a_k = prod_{i<=k} sigmoid(logit_i / T_i)`` against "the
    block survived through k" over the blocks of the report split whose draft reached k (before: all T = 1).
    ``ece_noise_floor`` is what exactly right predictions equal to the calibrated ones would show on as many blocks.
    ``auc[k]`` ranks the confidence of position k among blocks that survived to k; None where one outcome is missing.

    ``temperatures`` are for the head as trained. ``fold`` holds what ``export.fold_calibration=true`` puts into the
    weights, and the temperatures that are right on top of it: the two lists are never applied together.
    """

    drafter_sha256: str
    block_size: int  # draft tokens per block, the number of confidences
    temperatures: tuple[float, ...]
    ece_before: Values
    ece_after: Values
    ece_noise_floor: Values
    auc: Values
    brier_before: Values
    brier_after: Values
    num_samples: int  # blocks of the report split
    num_bins: int
    domains: dict[str, int]  # blocks of the report split per domain
    fit_split: dict[str, int]  # conversations and blocks the temperatures were fitted on
    report_split: dict[str, int]  # conversations and blocks everything here is measured on
    ece_before_ci95: Intervals = ()
    ece_after_ci95: Intervals = ()
    ece_fit_before: Values = ()  # the same on the fit split, to tell over-fitting from a shift
    ece_fit_after: Values = ()
    samples_per_position: tuple[int, ...] = ()  # blocks of the fit split that reached the position
    positions_without_data: tuple[int, ...] = ()  # 1-based, fewer than ``min_samples``; their temperature stayed 1
    positions_right_already: tuple[int, ...] = ()  # by calibration.noise_guard; their temperature stayed 1
    positions_at_grid_edge: tuple[int, ...] = ()
    refit_fraction: float = 0.0  # with ``fit_fraction``, what ``split_conversations`` cut the records by
    fit_fraction: float = 0.5
    confidence_head: str = "joint"  # joint | refit
    sampling_temperature: float = 1.0
    min_samples: int = 1
    method: str = "sts"  # what ``apply`` uses; engines read the temperatures whatever it says
    # Per form of the confidence (raw, sts, folded, folded_sts and those of calibration.method and .compare): ece,
    # ece_ci95, noise_floor, brier, auc per position, engines (who can use it), parameters where it has some.
    methods: dict[str, Any] = field(default_factory=dict)
    fold: dict[str, Any] = field(default_factory=dict)  # temperature, shift, temperatures[K], samples
    excess: dict[str, Any] = field(default_factory=dict)  # see measure.excess
    need: dict[str, Any] = field(default_factory=dict)  # see measure.need: whether calibration is needed, and why
    per_domain: dict[str, Any] = field(default_factory=dict)  # see domains.domain_report
    survival: Values = ()  # observed share of report blocks that survived through each position
    accepted_per_block: Optional[float] = None  # mean accepted draft tokens of report blocks that were known in full
    source: str = "deepspec"  # where the records were made
    verdict: str = ""
    fingerprint: str = ""  # of everything that decided this file
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def identity(cls, block_size: int, drafter_sha256: str = "") -> "Calibration":
        """Temperatures of 1, nothing measured."""
        none = (None,) * block_size
        return cls(drafter_sha256, block_size, (1.0,) * block_size, none, none, none, none, none, none, 0, 20, {},
                   {"conversations": 0, "blocks": 0}, {"conversations": 0, "blocks": 0})

    def apply(self, logits: ArrayLike) -> Floats:
        """Calibrated confidences, float64, from logits of the head as trained [..., k], k up to ``block_size``.

        ``sigmoid(logit_k / T_k)``, or the map of position k where ``method`` is not sts.
        """
        logits = np.asarray(logits, dtype=np.float64)
        if logits.shape[-1] > self.block_size:
            raise ValueError(f"logits have {logits.shape[-1]} positions, this calibration has {self.block_size}")
        if self.method != "sts":
            return apply_maps(self.methods[self.method]["parameters"], logits)
        return sigmoid(logits / np.asarray(self.temperatures[:logits.shape[-1]]))

    @property
    def folded(self) -> Fold:
        """Temperature and shift for ``export.fold_calibration``. Raises InputRefused for a file that has none."""
        try:
            fold = Fold(float(self.fold["temperature"]), float(self.fold["shift"]))
        except KeyError:
            raise InputRefused("this calibration.json was made before temperatures could be folded into the head: it "
                               "has no fold. Make it again with launch/calibrate.py.") from None
        except (TypeError, ValueError):
            fold = Fold(math.nan, math.nan)
        if not (0 < fold.temperature < math.inf and math.isfinite(fold.shift)):
            raise InputRefused(f"calibration.json is damaged: fold={self.fold!r} has no temperature above 0 and shift. "
                               "Make it again with launch/calibrate.py.")
        return fold

    def save(self, path: str | PathLike[str]) -> None:
        """Write calibration.json atomically; ``sts_temperatures`` repeats ``temperatures`` for engines."""
        atomic_write_json(path, asdict(self) | {"sts_temperatures": list(self.temperatures)})

    @classmethod
    def load(cls, path: str | PathLike[str], *, block_size: Optional[int] = None,
             drafter_sha256: Optional[str] = None) -> "Calibration":
        """Read calibration.json. Raises InputRefused if it is missing, unreadable, or not of this drafter."""
        again = "Make it again with launch/calibrate.py."
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            values = {one.name: values[one.name] for one in fields(cls) if one.name in values}
            loaded = cls(**{name: _frozen(value) for name, value in values.items()})
            tables = {name: getattr(loaded, name) for name in ("methods", "fold", "excess", "need", "per_domain")}
            if wrong := [name for name, value in tables.items() if not isinstance(value, dict)]:
                raise ValueError(f"{wrong[0]} is no table of names and values")
            right = len(loaded.temperatures) == loaded.block_size and all(
                0 < value < math.inf for value in loaded.temperatures)
        except FileNotFoundError:
            raise InputRefused(f"no calibration at {path}. {again}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise InputRefused(f"{path} is not a calibration ({error}). {again}") from None
        if not right:
            raise InputRefused(f"{path}: temperatures {loaded.temperatures} must be {loaded.block_size} positive "
                               f"numbers. {again}")
        if loaded.method != "sts" and "parameters" not in loaded.methods.get(loaded.method, {}):
            raise InputRefused(f"{path}: method is {loaded.method!r}, but methods has no parameters of it. {again}")
        for name, expected in (("block_size", block_size), ("drafter_sha256", drafter_sha256)):
            found = getattr(loaded, name)
            if expected is not None and found != expected:
                raise InputRefused(f"{path}: {name} is {found!r}, this drafter has {expected!r}. {again}")
        return loaded


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
