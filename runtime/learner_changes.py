"""What one adapter drafts better or worse than another, and what chance makes of that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .learner_judge import Drafted

_ERRORS = 1.64
"""Standard errors that chance exceeds once in twenty times, to one side."""
_MOST_LOST = 0.01
"""Of acceptance, that an adapter may lose even where chance explains more."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Of an acceptance, from one adapter to another on the same responses."""

    gain: float
    chance: float
    """What it comes to by chance alone, if each response is as likely to gain as to lose."""

    @classmethod
    def of(cls, gains: npt.NDArray[np.float64]) -> "Change":
        """The change to which every response adds its part of ``[responses]``."""
        chance = _ERRORS * math.sqrt(np.square(gains).sum())
        return cls(gain=float(gains.sum()), chance=chance)

    @property
    def is_better(self) -> bool:
        """Whether chance does not explain the gain."""
        return self.gain > self.chance

    @property
    def is_worse(self) -> bool:
        """Whether chance does not explain the loss."""
        return self.gain < -self.chance

    @property
    def is_loss(self) -> bool:
        """Whether the loss is more than chance explains, or than is ever let pass."""
        return self.gain < -min(self.chance, _MOST_LOST)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Of both acceptances, and of their mean."""

    greedy: Change
    sampled: Change
    mean: Change

    @property
    def is_loss(self) -> bool:
        """Whether either acceptance lost more than is let pass."""
        return self.greedy.is_loss or self.sampled.is_loss

    @property
    def is_worse(self) -> bool:
        """Whether chance does not explain a loss of either, or of their mean."""
        return self.greedy.is_worse or self.sampled.is_worse or self.mean.is_worse


def changes(before: Sequence[Drafted], after: Sequence[Drafted]) -> Changes:
    """From one adapter to another, response by response.

    The tokens of a response gain and lose together, so a response counts as one trial: that of
    McNemar's test for drafted and not drafted tokens, were each response one token.

    Args:
        before: What the one would have drafted of some responses.
        after: What the other would have of the same.

    Source:
        McNemar 1947, "Note on the sampling error of the difference between correlated
        proportions or percentages", Psychometrika 12.
    """
    gains = []
    for number in (0, 1):
        sums = [[float(one[number].sum()) for one in drafts] for drafts in (before, after)]
        total = sum(len(one[number]) for one in after)
        gains.append((np.array(sums[1]) - np.array(sums[0])) / max(total, 1))
    return Changes(
        greedy=Change.of(gains[0]),
        sampled=Change.of(gains[1]),
        mean=Change.of((gains[0] + gains[1]) / 2),
    )
