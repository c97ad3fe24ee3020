"""What a round costs by the length of its draft, and what further pieces are expected to gain."""

from dataclasses import dataclass

import numpy as np

from .draft_times import Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundCosts:
    """Of one round, in seconds."""

    drafting: Floats
    """``[max + 1]`` of so many pieces."""
    rest: Floats
    """``[max + 1]`` of the round after so many pieces were drafted."""
    rest_of_lookup: Floats
    """``[max + 1]`` the same after so many tokens."""
    acceptance: Floats
    """``[max]`` conditional acceptance of each piece, as far as is known before it is drafted."""
    worth: float
    """Of one more accepted piece."""

    def gain_of_pass(self, num: int, survival: float, expected: Floats) -> float:
        """What another pass of the drafter is expected to gain after `num` pieces.

        The better of two ways to go on: to draft a certain number of pieces, or a single one
        which is left out if it turns out to promise less than it costs to verify.

        Args:
            num: Pieces drafted so far.
            survival: Probability that all of them are accepted.
            expected: ``[any]`` acceptance of other pieces, once their logits were known.
        """
        gains = self.worth * survival * expected - (self.rest[num + 1] - self.rest[num])
        gain_of_one = float(np.maximum(gains, 0).mean())
        gain_of_one -= float(self.drafting[num + 1] - self.drafting[num])
        return max(gain_of_one, self._gain(num, survival))

    def gain_of_piece(self, num: int, survival: float) -> float:
        """What it gains to propose one more piece after `num`, and others if these pay.

        Args:
            num: Pieces before it.
            survival: Probability that they and it are accepted.
        """
        gain = self.worth * survival - float(self.rest[num + 1] - self.rest[num])
        return gain + max(0.0, self._gain(num + 1, survival))

    def _gain(self, num: int, survival: float) -> float:
        costs = self.drafting[num:] + self.rest[num:]
        return best_length(self.acceptance[num:], costs, self.worth * survival)[1]


def best_length(acceptance: Floats, costs: Floats, worth: float) -> tuple[int, float]:
    """The number of drafts, at least one, of the largest expected gain, and that gain.

    Args:
        acceptance: ``[n]`` conditional acceptance of each; for none 0 drafts gain nothing.
        costs: ``[n + 1]`` seconds with so many; only differences count.
        worth: Seconds that one accepted draft is worth.
    """
    if not len(acceptance):
        return 0, 0.0
    gains = worth * acceptance.cumprod().cumsum() - (costs[1:] - costs[0])
    best = int(gains.argmax())
    return best + 1, float(gains[best])
