"""Weights of tokens or branches: their sums, and draws by them."""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .proposal import Probs

AnyIds = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_BLOCK = 512
"""Weights whose sum a draw looks at before it looks at them one by one."""
_FEW = 256
"""Tokens that are looked up one by one among those that have a weight."""


def sum_type(weights: Probs) -> type[np.float64] | None:
    """Weights are summed in float64, fractions as fractions."""
    return None if weights.dtype == object else np.float64


def total(weights: Probs) -> np.float64:
    """Sum of all weights."""
    summed: np.float64 = np.add.reduce(weights, dtype=sum_type(weights))
    return summed


class Sampler:
    """Draws indices with probability proportional to their weight; sums up once for all draws."""

    def __init__(self, weights: Probs) -> None:
        """Draw by these ``[n]`` weights, none negative; they need not sum to 1."""
        self._weights = weights
        sums = weights
        self._is_long = len(weights) > 4 * _BLOCK
        if self._is_long:
            starts = np.arange(0, len(weights), _BLOCK)
            sums = np.add.reduceat(weights, starts)
        self._sums = np.cumsum(sums, dtype=sum_type(weights))

    @property
    def total(self) -> np.float64:
        """Sum of all weights; of one that is not above 0 nothing can be drawn."""
        summed: np.float64 = self._sums[-1] if len(self._sums) else np.float64(0)
        return summed

    def draw(self, rng: np.random.Generator) -> int:
        """One index; asks for one random number."""
        return self._index(rng.random() * self.total)

    def draw_other(self, index: int, rng: np.random.Generator) -> int:
        """One index, never `index`, by the weights of the others, which must not all be 0."""
        weight = self._weights[index]
        at = rng.random() * (self.total - weight)
        before = self._before(index)
        return self._index(at if at < before else at - -weight)

    def _index(self, at: Any) -> int:
        """The index whose part of the total `at` lies in."""
        index = _first_above(self._sums, at)
        if not self._is_long:
            return index
        if index:
            at -= self._sums[index - 1]
        within = _first_above(self._sums_in_block(index), at)
        return index * _BLOCK + within

    def _before(self, index: int) -> Any:
        """Sum of the weights before an index."""
        block, within = divmod(index, _BLOCK) if self._is_long else (index, 0)
        before = self._sums[block - 1] if block else 0
        return before + self._sums_in_block(block)[within - 1] if within else before

    def _sums_in_block(self, index: int) -> Probs:
        block = self._weights[index * _BLOCK : (index + 1) * _BLOCK]
        return np.cumsum(block, dtype=sum_type(block))


def sample(weights: Probs, rng: np.random.Generator) -> int:
    """An index, drawn with probability proportional to its weight; see `Sampler`."""
    return Sampler(weights).draw(rng)


class TokenLaw:
    """A law over a vocabulary up to a factor, of all tokens or of the few that have a weight."""

    def __init__(self, weights: Probs, ids: AnyIds | None = None, size: int | None = None) -> None:
        """Take a law.

        Args:
            weights: ``[tokens]`` none negative.
            ids: ``[tokens]`` rising ids that these belong to, all others have none; None where
                every id of the vocabulary has its own.
            size: Ids of the vocabulary; None for as many as weights.
        """
        self.weights = weights
        self.ids = ids
        self._size = len(weights) if size is None else size

    @property
    def total(self) -> np.float64:
        """Sum of all weights."""
        return self._sampler.total

    def draw(self, rng: np.random.Generator) -> int:
        """A token; asks for one random number."""
        return self._id(self._sampler.draw(rng))

    def draw_other(self, token_id: int, rng: np.random.Generator) -> int:
        """A token of those that are not `token_id`, which must have some weight together."""
        index = token_id
        if self.ids is not None:
            index = int(self.ids.searchsorted(token_id))
            if index == len(self.ids) or self.ids[index] != token_id:
                return self.draw(rng)
        return self._id(self._sampler.draw_other(index, rng))

    def of(self, token_ids: AnyIds) -> Probs:
        """The weights of some tokens."""
        ids = self.ids
        if ids is None or len(token_ids) > _FEW:
            return self.dense[token_ids]
        places = np.minimum(ids.searchsorted(token_ids), max(len(ids) - 1, 0))
        found: Probs = self.weights[places] * (ids[places] == token_ids)
        return found

    def mass(self, token_ids: AnyIds) -> Any:
        """The sum of the weights of some tokens."""
        return total(self.of(token_ids))

    @cached_property
    def dense(self) -> Probs:
        """``[vocab]`` the weights of all tokens."""
        if self.ids is None:
            return self.weights
        dense = np.zeros(self._size, self.weights.dtype)
        dense[self.ids] = self.weights
        return dense

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.weights)

    def _id(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


def _first_above(sums: Probs, at: object) -> int:
    """First of rising sums above `at`; where rounding leaves none, the first of the largest."""
    index = int(sums.searchsorted(at, side="right"))  # type: ignore[call-overload]
    return index if index < len(sums) else int(sums.searchsorted(sums[-1], side="left"))
