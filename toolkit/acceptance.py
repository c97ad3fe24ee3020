"""How often drafts were accepted lately: by place in the round, and by the drafter's confidence."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_KEPT = 0.97
"""Weight of what is known after another round."""
_GUESS_WEIGHT = 3.0
"""Drafts that the first guess counts as."""
_EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99])
"""Between groups of confidence."""


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

    def observe(self, num_accepted: int, num_tested: int) -> None:
        """Count a round, of which the first `num_tested` drafts came to be tested."""
        self._reserve(num_tested)
        self._tested *= _KEPT
        self._accepted *= _KEPT
        self._tested[:num_tested] += 1
        self._accepted[:num_accepted] += 1

    def _reserve(self, num: int) -> None:
        missing = max(0, num - len(self._tested))
        if missing:
            self._tested = np.append(self._tested, np.zeros(missing))
            self._accepted = np.append(self._accepted, np.zeros(missing))


class ConfidenceAcceptance:
    """Acceptance of a piece by the probability of the drafter's likeliest piece there.

    What is known fades in rounds that tell nothing too: a group that is not drafted any
    more since it failed is tried again after a while.
    """

    def __init__(self) -> None:
        self._tested = np.zeros(len(_EDGES) + 1)
        self._accepted = np.zeros(len(_EDGES) + 1)

    def expected(self, confidence: float) -> float:
        """Conditional acceptance; the confidence itself until such drafts were tested."""
        group = _EDGES.searchsorted(confidence)
        accepted = float(self._accepted[group]) + _GUESS_WEIGHT * confidence
        return accepted / (float(self._tested[group]) + _GUESS_WEIGHT)

    def observe(self, confidences: npt.ArrayLike, num_accepted: int, num_tested: int) -> None:
        """Count a round by the confidence of its drafts."""
        self._tested *= _KEPT
        self._accepted *= _KEPT
        groups = _EDGES.searchsorted(np.asarray(confidences, np.float64)[:num_tested])
        np.add.at(self._tested, groups, 1)
        np.add.at(self._accepted, groups[:num_accepted], 1)


def confidence(logits: npt.NDArray[np.float32]) -> float:
    """Probability of the likeliest of ``[pieces]`` logits, at temperature 1."""
    return 1 / float(np.exp(logits - logits.max()).sum())
