"""How often drafts were accepted lately: by place in the round, and by the drafter's confidence."""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_KEPT = 0.97
"""Weight of what is known after another round."""
_GUESS_WEIGHT = 3.0
"""Drafts that the first guess counts as."""
_KEPT_BY_LINE = 0.995
"""The same after another piece, for `Calibration`."""
_PRIOR_VARIANCE = np.array([1.0, 0.25])
"""Of its intercept and slope."""


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
    """Turns a guess of acceptance into what was found lately where guesses were like it.

    ``logit(acceptance) = intercept + slope * logit(guess)``, which begins as the guess itself;
    a logistic regression that goes on piece by piece, by an extended Kalman filter.
    """

    def __init__(self) -> None:
        self._line = np.array([0.0, 1.0])
        self._covariance = np.diag(_PRIOR_VARIANCE)

    def expected(self, guess: float) -> float:
        """Conditional acceptance where the guess is this."""
        return _sigmoid(float(self._line @ _point(guess)))

    def observe(self, guess: float, is_accepted: bool) -> None:
        """Count a piece that was tested."""
        point = _point(guess)
        expected = _sigmoid(float(self._line @ point))
        spread = max(expected * (1 - expected), 0.02)
        # What is known fades, but never to less than was known at first.
        covariance = self._covariance / _KEPT_BY_LINE
        covariance *= min(1.0, _PRIOR_VARIANCE.sum() / covariance.trace())
        gain = covariance @ point / (1 + spread * (point @ covariance @ point))
        self._line += gain * (is_accepted - expected)
        self._covariance = covariance - spread * np.outer(gain, point @ covariance)


def confidence(logits: npt.NDArray[np.float32]) -> float:
    """Probability of the likeliest of ``[pieces]`` logits, at temperature 1."""
    return 1 / float(np.exp(logits - logits.max()).sum())


def _point(guess: float) -> Floats:
    guess = min(max(guess, 1e-3), 1 - 1e-3)
    return np.array([1.0, math.log(guess / (1 - guess))])


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
