"""How much longer rounds take than the profile says, by kind, and how often the worse kind may be tried."""

from collections import defaultdict, deque

_SAMPLES = 15  # latest rounds of a kind; their median counts
ENOUGH = 3  # rounds of a kind below which nothing is concluded
_LEAST_LOSS = 0.02  # choices that are about as good are not told apart further than this
_LEAST_GAP = 4
_MOST_DOUBLINGS = 4  # of the gap between trials that change nothing


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]


class Trials:
    """How often the worse choice was tried in vain, by the magnitude of the request count."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[bool, int]] = {}

    def failed(self, requests: int, drafts: bool) -> int:
        """Trials since the choice at this load became ``drafts``, at most the number of doublings of their gap."""
        choice, count = self._counts.get(requests.bit_length(), (drafts, 0))
        return count if choice == drafts else 0

    def count(self, requests: int, drafts: bool) -> None:
        """A trial against the choice ``drafts``; the counting begins anew when the choice has changed."""
        count = min(self.failed(requests, drafts) + 1, _MOST_DOUBLINGS)
        self._counts[requests.bit_length()] = (drafts, count)


class CostDrift:
    """Measured over predicted seconds of rounds with and without drafting, by the magnitude of the request count.

    A profile is made once; clocks throttle and neighbours come and go. Only the ratio of the two kinds decides whether
    drafting pays, so that a machine that is slower as a whole changes nothing.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=_SAMPLES))
        self._factor: dict[int, float] = {}
        self.trials = Trials()

    def observe(self, requests: int, drafted: bool, measured: float, predicted: float) -> None:
        """A settled round; times in s."""
        size = requests.bit_length()
        self._ratios[size, drafted].append(measured / predicted)
        kinds = [self._ratios[size, kind] for kind in (True, False)]
        if all(len(ratios) >= ENOUGH for ratios in kinds):
            self._factor[size] = _median(kinds[0]) / _median(kinds[1])

    def drafting(self, requests: int) -> float:
        """Factor on the predicted cost of drafting rounds relative to that of plain ones; 1 while unknown."""
        return self._factor.get(requests.bit_length(), 1.0)

    def lacks(self, requests: int, drafted: bool) -> bool:
        """Whether too few rounds of a kind were seen at this load."""
        return len(self._ratios[requests.bit_length(), drafted]) < ENOUGH


def trial_gap(advantage: float, seconds_ratio: float, share: float, most: int, failed: int = 0) -> int:
    """Rounds between two trials of the worse choice, so that trials cost ``share`` of the throughput.

    ``advantage``: throughput of the better choice over that of the worse one; ``seconds_ratio``: how long a round of
    the worse choice takes relative to one of the better. Each of the ``failed`` trials before doubles the gap.
    """
    tried = share / max(1.0 - 1.0 / max(advantage, 1.0), _LEAST_LOSS)  # share of the time
    if tried * most <= seconds_ratio:
        return most
    return min(max(_LEAST_GAP, round((1.0 / min(tried, 1.0) - 1.0) * seconds_ratio)) << failed, most)
