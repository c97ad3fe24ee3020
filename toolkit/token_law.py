"""Weights of tokens or branches: their sums, and draws by them."""

from functools import cached_property, lru_cache
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


def running_sums(weights: Probs) -> Probs:
    """``[n]`` sums up to each weight; a copy of another type first is twice as fast."""
    wide = weights if weights.dtype == object else weights.astype(np.float64)
    sums: Probs = wide.cumsum()
    return sums


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
            sums = np.add.reduceat(weights, _block_starts(len(weights), _BLOCK))
        self._sums = running_sums(sums)
        self.total: Any = self._sums.item(-1) if len(weights) else 0.0
        """Sum of all weights; of one that is not above 0 nothing can be drawn."""

    def draw(self, rng: np.random.Generator) -> int:
        """One index; asks for one random number."""
        return self._index(rng.random() * self.total)

    def draw_other(self, index: int, rng: np.random.Generator) -> int:
        """One index, never `index`, by the weights of the others, which must not all be 0."""
        weight = self._weights.item(index)
        at = rng.random() * (self.total - weight)
        before = self._before(index)
        return self._index(at if at < before else at - -weight)

    def _index(self, at: Any) -> int:
        """The index whose part of the total `at` lies in."""
        index = first_above(self._sums, at)
        if not self._is_long:
            return index
        if index:
            at -= self._sums.item(index - 1)
        within = first_above(self._sums_in_block(index), at)
        return index * _BLOCK + within

    def _before(self, index: int) -> Any:
        """Sum of the weights before an index."""
        block, within = divmod(index, _BLOCK) if self._is_long else (index, 0)
        before = self._sums[block - 1] if block else 0
        return before + self._sums_in_block(block)[within - 1] if within else before

    def _sums_in_block(self, index: int) -> Probs:
        return running_sums(self._weights[index * _BLOCK : (index + 1) * _BLOCK])


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
    def total(self) -> Any:
        """Sum of all weights."""
        return self._sampler.total

    def draw(self, rng: np.random.Generator) -> int:
        """A token; asks for one random number."""
        return self._id(self._sampler.draw(rng))

    def draw_other(self, token_id: int, rng: np.random.Generator) -> int:
        """A token of those that are not `token_id`, which must have some weight together."""
        index = self._index(token_id)
        if index is None:
            return self.draw(rng)
        return self._id(self._sampler.draw_other(index, rng))

    def weight(self, token_id: int) -> Any:
        """The weight of one token."""
        index = self._index(token_id)
        return 0.0 if index is None else self.weights.item(index)

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
        if len(token_ids) == 1:
            return self.weight(token_ids.item())
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

    def _index(self, token_id: int) -> int | None:
        """Where a token's weight is, None where it has none."""
        if self.ids is None:
            return token_id
        index = int(self.ids.searchsorted(token_id))
        return index if index < len(self.ids) and self.ids.item(index) == token_id else None

    def _id(self, index: int) -> int:
        return index if self.ids is None else int(self.ids[index])


@lru_cache(maxsize=8)
def _block_starts(size: int, block: int) -> npt.NDArray[np.int64]:
    return np.arange(0, size, block)


def first_above(sums: Probs, at: object) -> int:
    """First of rising sums above `at`; where rounding leaves none, the first of the largest."""
    index = int(sums.searchsorted(at, side="right"))  # type: ignore[call-overload]
    return index if index < len(sums) else int(sums.searchsorted(sums[-1], side="left"))
