"""How often drafts were accepted lately: by place in the round, and by the drafter's confidence."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_KEPT = 0.97
"""Weight of what is known after another round."""
_GUESS_WEIGHT = 3.0
"""Drafts that the first guess counts as."""
_KEPT_BY_WEIGHTS = 0.995
"""The same after another piece, for `Calibration`."""
_BIAS_VARIANCE, _WEIGHT_VARIANCE = 1.0, 0.25
"""How far its weights may be from what they begin as."""


class PlaceAcceptance:
    """Acceptance of the first, second, ... draft of a round, given that all before were accepted.

    Places far back are seen rarely: each is drawn towards what all have together.
    """

    def __init__(self, guess: float) -> None:
        """Expect `guess` of every place until drafts were tested."""
        self._guess = guess
        self._tested = np.zeros(0)
        self._accepted = np.zeros(0)

    def expected(self, num: int) -> Floats:
        """``[num]`` conditional acceptance, place by place; above 0 and below 1."""
        self._reserve(num)
        weight = _GUESS_WEIGHT
        together = (self._accepted.sum() + weight * self._guess) / (self._tested.sum() + weight)
        found: Floats = (self._accepted + weight * together) / (self._tested + weight)
        return found[:num]

    def observe(self, num_accepted: int, num_tested: int, left_out: float | None = None) -> None:
        """Count a round.

        Args:
            num_accepted: Drafts that were accepted.
            num_tested: Those and the one that was not, if there was one.
            left_out: Expected acceptance of a piece after these that was not drafted for it;
                without it only places would count that promised much.
        """
        self._reserve(num_tested + 1)
        self._tested *= _KEPT
        self._accepted *= _KEPT
        self._tested[:num_tested] += 1
        self._accepted[:num_accepted] += 1
        if left_out is not None and num_accepted == num_tested:
            self._tested[num_tested] += 1
            self._accepted[num_tested] += left_out

    def _reserve(self, num: int) -> None:
        missing = max(0, num - len(self._tested))
        if missing:
            self._tested = np.append(self._tested, np.zeros(missing))
            self._accepted = np.append(self._accepted, np.zeros(missing))


class Calibration:
    """Turns guesses of acceptance into what was found lately where guesses were like them.

    The logit of acceptance is a weighted sum of the guesses' logits and 1. It begins as the
    first guess; further ones get weight where they prove to know more. A logistic
    regression that goes on piece by piece, by an extended Kalman filter.
    """

    def __init__(self, num_guesses: int = 1) -> None:
        """Weigh so many guesses of the same event."""
        self._weights = np.zeros(1 + num_guesses)
        self._weights[1] = 1
        self._variance = np.full(1 + num_guesses, _WEIGHT_VARIANCE)
        self._variance[0] = _BIAS_VARIANCE
        self._covariance = np.diag(self._variance)

    @property
    def num_guesses(self) -> int:
        """Guesses that it weighs."""
        return len(self._weights) - 1

    def expected(self, guesses: Sequence[float]) -> float:
        """Conditional acceptance where the guesses are these."""
        return _sigmoid(float(self._weights @ _point(guesses)))

    def observe(self, guesses: Sequence[float], is_accepted: bool) -> None:
        """Count a piece that was tested."""
        point = _point(guesses)
        expected = _sigmoid(float(self._weights @ point))
        spread = max(expected * (1 - expected), 0.02)
        # What is known fades, but never to less than was known at first.
        covariance = self._covariance / _KEPT_BY_WEIGHTS
        covariance *= min(1.0, self._variance.sum() / covariance.trace())
        gain = covariance @ point / (1 + spread * (point @ covariance @ point))
        self._weights += gain * (is_accepted - expected)
        self._covariance = covariance - spread * np.outer(gain, point @ covariance)


def confidence(logits: npt.NDArray[np.float32]) -> float:
    """Probability of the likeliest of ``[pieces]`` logits, at temperature 1."""
    return 1 / float(np.exp(logits - logits.max()).sum())


def _point(guesses: Sequence[float]) -> Floats:
    clipped = np.clip(np.array(guesses), 1e-3, 1 - 1e-3)
    return np.append(1.0, np.log(clipped / (1 - clipped)))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
