"""Measured times of a round's parts, as running medians."""

import statistics
from collections import deque

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_FIRST_REACH = 8
"""Drafts that may be tried before more than none were measured."""
_KEPT = 9
"""Latest measurements that a median is of."""


class RunningMedian:
    """Of the latest measurements; the first of all is replaced by the second.

    What runs for the first time allocates and compiles, so its time says little.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self.num = 0
        """Measurements so far."""

    def add(self, seconds: float) -> None:
        """Count one measurement."""
        if self.num == 1:
            self._latest.clear()
        self._latest.append(seconds)
        self.num += 1

    @property
    def value(self) -> float:
        """Seconds; 0 before there is any measurement."""
        return statistics.median(self._latest) if self._latest else 0.0


class DraftTimes:
    """What drafting a piece costs, and what the rest of a round with so many drafts."""

    def __init__(self) -> None:
        self._first, self._further = RunningMedian(), RunningMedian()
        self._rest: dict[int, RunningMedian] = {}

    def observe_drafting(self, further: list[float], first: float | None) -> None:
        """Count the seconds of a round's first piece, and of each one after it."""
        for seconds in further:
            self._further.add(seconds)
        if first is not None:
            self._first.add(first)

    def observe_rest(self, num_drafts: int, seconds: float) -> None:
        """Count the seconds from the end of drafting to the end of the round."""
        self._rest.setdefault(num_drafts, RunningMedian()).add(seconds)

    @property
    def further_s(self) -> float:
        """Seconds of a piece that is not the first of its round."""
        return self._further.value

    @property
    def num_plain(self) -> int:
        """Rounds without drafts so far."""
        return self._rest[0].num if 0 in self._rest else 0

    @property
    def num_drafted(self) -> int:
        """Rounds with drafts so far."""
        return sum(median.num for k, median in self._rest.items() if k)

    def drafting(self, num: int) -> Floats:
        """``[num + 1]`` seconds to draft 0, 1, ... `num` pieces."""
        further = self._further if self._further.num else self._first
        times = np.full(num + 1, further.value)
        times[0] = 0
        times[1:2] = self._first.value
        return times.cumsum()

    def rest(self, num_drafts: Floats) -> Floats:
        """Seconds of the rest of a round by its number of drafts, which may be fractional.

        Between lengths that were measured the time is interpolated; past the longest, it goes
        on rising as it did on average, and past four times as much it is infinite: lengths are
        tried step by step. A length measured once only is not trusted.
        """
        known = sorted(k for k, median in self._rest.items() if median.num > 1)
        if not known:
            return np.zeros_like(num_drafts)
        times = [self._rest[k].value for k in known]
        slope = 0.0
        if len(known) > 1:
            slope = max(0.0, (times[-1] - times[0]) / (known[-1] - known[0]))
        found: Floats = np.interp(num_drafts, known, times)
        found += slope * np.maximum(0, num_drafts - known[-1])
        found[num_drafts > max(_FIRST_REACH, 4 * known[-1])] = np.inf
        return found
