"""The likeliest of many logits, found without looking at each more than once."""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

_GROUPS = 4096
"""Groups of logits whose largest is known; they lie across the row, so that one pass finds all."""
_MOST = _GROUPS // 2
"""Groups that are looked into one by one; with more of them the whole row is."""


class Peaks:
    """The largest of every group of a row of logits, and from them those above a bound."""

    def __init__(self, logits: Logits) -> None:
        """Look at ``[n]`` logits."""
        self._logits = logits
        self._is_long = len(logits) >= 8 * _GROUPS
        self._tail = len(logits) // _GROUPS * _GROUPS
        highest = logits
        if self._is_long:
            highest = self._table.max(axis=0)
            rest = logits[self._tail :]
            np.maximum(highest[: len(rest)], rest, out=highest[: len(rest)])
        self._highest = highest

    @cached_property
    def max(self) -> np.float32:
        """The largest of all; minus infinity of none."""
        largest: np.float32 = self._highest.max(initial=-np.inf)
        return largest

    def floor(self, count: int) -> Any:
        """A bound that at least `count` logits are not below, and mostly few more.

        As many as `count` are not below the `count`-th largest of the groups.
        """
        rank = len(self._highest) - count
        return -np.inf if rank < 0 else np.partition(self._highest, rank)[rank]

    def at_least(self, bound: Any) -> npt.NDArray[np.int64]:
        """Rising indices of the logits that are not below `bound`."""
        logits = self._logits
        if not self._is_long:
            return np.flatnonzero(logits >= bound)
        groups = np.flatnonzero(self._highest >= bound)
        if len(groups) > _MOST:
            return np.flatnonzero(logits >= bound)
        rows, places = np.nonzero(self._table.take(groups, axis=1) >= bound)
        rest = np.flatnonzero(logits[self._tail :] >= bound)
        return np.concatenate((rows * _GROUPS + groups[places], rest + self._tail))

    @property
    def _table(self) -> Logits:
        """``[n // groups, groups]``, but for what is left of the row."""
        return self._logits[: self._tail].reshape(-1, _GROUPS)
