"""How many draft tokens to verify (Sec. 3.2.2, Algorithm 1, Sec. 5.2). Numpy only.

R requests, K draft tokens, B tokens of one verification step. A *cost curve* maps B (array) to seconds per step; SPS is
its reciprocal.
"""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepspec.errors import InputRefused

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
StepsPerSecond = Callable[[NDArray[Any]], Floats]  # batch tokens [n] -> steps per second [n]

FLAT_SPREAD = 0.05  # below this difference between the cheapest and dearest step a table cannot inform anybody
_AGAIN = "Measure again with launch/profile_throughput.py and a wider grid (profile.num_reqs, profile.verify_lengths)."


@dataclass(frozen=True)
class SpsTable:
    """Steps per second against batch tokens, ``SPS(B)``.

    Lookup: ``linear`` interpolates the *cost* between probes; ``floor`` prices a count as the probe below it (SGLang's
    1-D loader), ``ceil`` as the probe above it (padding to captured sizes). Below the first probe the first one holds.
    Beyond the last probe the cost goes on with the slope of the last segment, and at least per-token proportionally if
    there is no slope; beyond ``max_batch_tokens`` SPS is 0, so nothing is ever scheduled there.
    """

    batch_tokens: Ints  # [n] strictly increasing
    seconds: Floats  # [n] per step, not decreasing
    max_batch_tokens: int
    lookup: str = "linear"

    @classmethod
    def from_samples(cls, batch_tokens: Sequence[int], steps_per_sec: Sequence[float],
                     max_batch_tokens: Optional[int] = None, *, lookup: str = "linear",
                     where: str = "throughput table") -> "SpsTable":
        """Check probes and build a table; cost is clamped to its running maximum so that noise never rewards more work.

        Raises:
            InputRefused: fewer than two probes, counts that are not strictly increasing integers, a rate that is not
                positive, a limit below the last probe, or a table flatter than 5 %.
        """
        tokens = list(batch_tokens)
        if any(isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1 for value in tokens):
            raise InputRefused(f"{where}: sample_batch_tokens must be integers from 1 up, got {tokens}. {_AGAIN}")
        if len(tokens) < 2 or len(tokens) != len(steps_per_sec):
            raise InputRefused(f"{where}: {len(tokens)} batch sizes and {len(steps_per_sec)} rates; a curve needs two "
                               f"probes or more, and as many rates. {_AGAIN}")
        if any(after <= before for before, after in zip(tokens, tokens[1:])):
            raise InputRefused(f"{where}: sample_batch_tokens must increase strictly, got {tokens}. {_AGAIN}")
        rates = np.asarray(steps_per_sec, dtype=np.float64)
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            raise InputRefused(f"{where}: sample_steps_per_sec must be positive, got {rates.tolist()}. {_AGAIN}")
        limit = tokens[-1] if max_batch_tokens is None else int(max_batch_tokens)
        if limit < tokens[-1]:
            raise InputRefused(f"{where}: max_batch_tokens={limit} is below the last probe {tokens[-1]}. {_AGAIN}")
        seconds = np.maximum.accumulate(1.0 / rates)
        refuse_flat(seconds, where)
        return cls(np.asarray(tokens, dtype=np.int64), seconds, limit, lookup)

    @classmethod
    def load(cls, path: str | PathLike[str], *, lookup: str = "linear", **expected: Any) -> "SpsTable":
        """Read ``profile/sps.json``. ``expected`` names header fields (hardware, dtype, ..) and the values needed.

        Raises:
            InputRefused: missing, unreadable, or measured under other conditions; the message names the field.
        """
        values = cls.require(path, **expected)
        return cls.from_samples(values["sample_batch_tokens"], values["sample_steps_per_sec"],
                                values.get("max_batch_tokens"), lookup=lookup, where=str(path))

    @staticmethod
    def require(path: str | PathLike[str], **expected: Any) -> dict[str, Any]:
        """The file's content if its header has the values ``expected``. Raises InputRefused as ``load`` does."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            _ = values["sample_batch_tokens"], values["sample_steps_per_sec"]
        except FileNotFoundError:
            raise InputRefused(f"throughput table not found: {path}. Make it with: launch/profile_throughput.py"
                               ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputRefused(f"{path} is not a throughput table ({error!r}). {_AGAIN}") from None
        for name, value in expected.items():
            if values.get(name) != value:
                raise InputRefused(f"{path}: {name} is {values.get(name)!r}, here it is {value!r}: the profile was "
                                   "measured under other conditions. Measure again with launch/profile_throughput.py.")
        return values

    def step_seconds(self, batch_tokens: ArrayLike) -> Floats:
        """Seconds per step of ``batch_tokens`` [n] by the stated lookup; infinite beyond ``max_batch_tokens``."""
        wanted = np.asarray(batch_tokens, dtype=np.float64)
        if self.lookup == "linear":
            cost = interpolate(self.batch_tokens.astype(np.float64), self.seconds, wanted)
        else:
            floor = self.lookup == "floor"
            index = np.searchsorted(self.batch_tokens, wanted, side="right" if floor else "left") - floor
            cost = self.seconds[np.clip(index, 0, len(self.seconds) - 1)]
            beyond = wanted > self.batch_tokens[-1]
            cost = np.where(beyond, self.seconds[-1] * wanted / self.batch_tokens[-1], cost)
        return np.where(wanted > self.max_batch_tokens, np.inf, cost)

    def steps_per_second(self, batch_tokens: ArrayLike) -> Floats:
        """``SPS(B)``: reciprocal of ``step_seconds``; 0 beyond ``max_batch_tokens``."""
        return 1.0 / self.step_seconds(batch_tokens)


def refuse_flat(seconds: Floats, where: str) -> None:
    """Raise InputRefused if the cost of a step hardly depends on its size: every schedule would look equally good."""
    spread = float(seconds.max() / seconds.min() - 1.0)
    if spread < FLAT_SPREAD:
        raise InputRefused(f"{where}: step times differ by {100 * spread:.1f} % over the whole table (less than "
                           f"{100 * FLAT_SPREAD:.0f} %), so it cannot say what verification costs. {_AGAIN}")


def interpolate(points: Floats, values: Floats, wanted: Floats) -> Floats:
    """Piecewise linear; constant below the first point, beyond the last with the last slope (or in proportion)."""
    result = np.interp(wanted, points, values)
    if len(points) > 1 and values[-1] > values[-2]:
        slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    else:
        slope = values[-1] / points[-1]
    return result + slope * np.maximum(wanted - points[-1], 0.0)


def lower_convex(points: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Lower convex envelope of a curve given by its corners.

    ``tau / cost`` rises and then falls when tau is concave and the cost convex, so that Algorithm 1's early stop cannot
    be trapped in front of a riser of a staircase; the envelope touches the curve where steps end.
    """
    kept: list[int] = []
    for i in range(len(points)):
        while len(kept) > 1 and ((values[kept[-1]] - values[kept[-2]]) * (points[i] - points[kept[-1]])
                                 >= (values[i] - values[kept[-1]]) * (points[kept[-1]] - points[kept[-2]])):
            kept.pop()
        kept.append(i)
    return points[kept], values[kept]


@dataclass(frozen=True)
class Schedule:
    """A decision: how many draft tokens of each request go to the target."""

    lengths: Ints  # [R], 0..K
    batch_tokens: int  # B = sum (1 + l_r)
    acceptance_length: float  # tau of the whole batch: expected tokens of the step, bonus tokens included
    throughput: float  # Theta, expected tokens per second


def expected_throughput(survival: ArrayLike, lengths: ArrayLike, steps_per_second: StepsPerSecond) -> float:
    """``Theta = tau * SPS(B)``, ``tau = sum_r (1 + sum_{j<=l_r} a_{r,j})``, ``B = sum_r (1 + l_r)`` (Sec. 3.2.2)."""
    survival, lengths = np.asarray(survival, dtype=np.float64), np.asarray(lengths)
    admitted = np.arange(survival.shape[1]) < lengths[:, None]
    tau = len(lengths) + float(survival[admitted].sum())
    batch_tokens = np.array([len(lengths) + int(lengths.sum())])
    return tau * float(steps_per_second(batch_tokens)[0])


def _ranked(survival: NDArray[Any], caps: Optional[ArrayLike]) -> tuple[Floats, Ints]:
    """Candidates by descending survival, ties in row order: values [n], row of each [n].

    The bits of a positive float32 sort like the number, so one integer sort of (inverted bits, flat index) is both
    stable and several times faster than a stable sort of floats.
    """
    flat = np.ascontiguousarray(survival, dtype=np.float32).reshape(-1)
    index = np.arange(flat.size, dtype=np.uint64)
    keys = (np.uint64(0xFFFFFFFF) - flat.view(np.uint32).astype(np.uint64)) << np.uint64(32) | index
    if caps is not None:
        allowed = np.arange(survival.shape[1]) < np.asarray(caps)[:, None]
        keys = keys[allowed.reshape(-1)]
    keys.sort()
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return flat[order].astype(np.float64), order // survival.shape[1]


@dataclass(frozen=True)
class _Candidates:
    """What admitting one token after the other would do; arrays of n + 1 start before the first admission."""

    rows: Ints  # [n] in the order of admission
    tau: Floats  # [n + 1]
    theta: Floats  # [n + 1]
    floor: Optional[Floats]  # [n + 1] worst rate of a request relative to what it was promised; None: no promises

    def schedule(self, admitted: int, requests: int) -> Schedule:
        """The decision to stop after ``admitted``."""
        lengths = np.bincount(self.rows[:admitted], minlength=requests)
        return Schedule(lengths, requests + admitted, float(self.tau[admitted]), float(self.theta[admitted]))


def _worst_share(survival: Floats, rows: Ints, values: Floats, floors: Floats, rates: Floats) -> Floats:
    """``min_r (1 + sum_{j<=l_r} a_{r,j}) SPS / floor_r`` after 0..n admissions [n + 1].

    A request holds a level of expected tokens until its next admission, and its levels only rise: so the smallest level
    that is held after n admissions is the smallest of those that end later.
    """
    requests, count = len(survival), len(rows)
    order = np.argsort(rows, kind="stable")  # by request, in the order of admission
    owner = np.concatenate((np.arange(requests), rows[order]))
    first = np.searchsorted(rows[order], np.arange(requests))
    sums = np.concatenate(([0.0], np.cumsum(values[order])))
    level = np.concatenate((np.ones(requests), 1.0 + sums[1:] - sums[first][rows[order]]))
    ends = np.full(requests + count, count + 1)  # admissions after which the level is held no more
    following = np.concatenate((first, np.arange(1, count + 1)))
    last = np.append(rows[order], -1)[following] != owner
    ends[~last] = order[following[~last]] + 1
    lowest = np.full(count + 2, np.inf)
    np.minimum.at(lowest, ends, level / floors[owner])
    return np.minimum.accumulate(lowest[::-1])[::-1][1:] * rates


def _candidates(survival: ArrayLike, caps: Optional[ArrayLike], steps_per_second: StepsPerSecond,
                floors: Optional[ArrayLike] = None) -> _Candidates:
    survival = np.asarray(survival)
    requests = survival.shape[0]
    values, rows = _ranked(survival, caps)
    tau = np.empty(len(values) + 1)
    tau[0] = requests
    np.cumsum(values, out=tau[1:])
    tau[1:] += requests
    rates = steps_per_second(np.arange(requests, requests + len(tau)))
    share = None
    if floors is not None:
        promised = np.broadcast_to(np.asarray(floors, dtype=np.float64), (requests,))
        share = _worst_share(survival, rows, values, np.maximum(promised, np.finfo(np.float64).tiny), rates)
    return _Candidates(rows, tau, tau * rates, share)


def schedule_prefixes(survival: ArrayLike, steps_per_second: StepsPerSecond, *,
                      caps: Optional[ArrayLike] = None, floors: Optional[ArrayLike] = None) -> Schedule:
    """Hardware-aware prefix scheduling (Alg. 1): admit by descending survival while ``Theta`` rises.

    The first admission that does not raise Theta ends the search, so whether a token is verified never depends on the
    tokens drafted after it: the output distribution stays the target's (Appendix A shows what a global search does).
    For the same reason there is no threshold on the final gain here: it would look at later tokens.

    Args:
        survival: a_{r,j} [R, K], not increasing along j.
        steps_per_second: SPS(B) of an array of batch sizes.
        caps: longest prefix per request [R]; None means K.
        floors: tokens per second promised to each request [R], or to all. An admission that takes the worst-served
            request below its promise, or further below, ends the search as well.
    """
    found = _candidates(survival, caps, steps_per_second, floors)
    stops = found.theta[1:] <= found.theta[:-1]
    if found.floor is not None:
        stops |= (found.floor[1:] < 1.0) & (found.floor[1:] < found.floor[:-1])
    first = int(stops.argmax()) if len(stops) else 0
    admitted = first if len(stops) and stops[first] else len(found.rows)
    return found.schedule(admitted, len(np.asarray(survival)))


def schedule_budget(survival: ArrayLike, lagged_survival: Optional[ArrayLike], steps_per_second: StepsPerSecond, *,
                    caps: Optional[ArrayLike] = None, floors: Optional[ArrayLike] = None,
                    min_gain: float = 0.0) -> Schedule:
    """Asynchronous top-K scheduling (Sec. 5.2): capacity from earlier rounds by global search, ranking by this round's.

    The global search follows a staircase over its risers. It stays lossless because the capacity is made of confidences
    of blocks that are already settled, and because ranking admits a token by its own prefix alone. A capacity whose
    predicted gain over no speculation is below ``min_gain`` (a share) is 0.

    Args:
        survival: current a_{r,j} [R, K].
        lagged_survival: a of earlier rounds [R', K]; requests without one count as 1. None verifies all.
        caps: longest prefix per request [R]; None means K.
        floors: tokens per second promised to each request [R], or to all: only capacities that keep every promise are
            looked at; if there is none, the one that comes nearest is taken.
    """
    requests, length = np.asarray(survival).shape
    if lagged_survival is None:
        capacity = requests * length
    else:
        lagged = np.ones((requests, length), dtype=np.float64)
        earlier = np.asarray(lagged_survival, dtype=np.float64)
        lagged[:min(requests, len(earlier))] = earlier[:requests]
        capacity = _capacity(_candidates(lagged, None, steps_per_second, floors), min_gain)
    found = _candidates(survival, caps, steps_per_second)
    return found.schedule(min(capacity, len(found.rows)), requests)


def _capacity(found: _Candidates, min_gain: float) -> int:
    """Admissions with the highest Theta among those that keep every promise."""
    theta = found.theta
    if found.floor is not None and not (found.floor >= 1.0).any():
        return int(found.floor.argmax())
    if found.floor is not None:
        theta = np.where(found.floor >= 1.0, theta, -np.inf)
    best = int(theta.argmax())
    return best if theta[best] >= (1.0 + min_gain) * theta[0] else 0
