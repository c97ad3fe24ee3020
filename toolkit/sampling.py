"""The law that decoding preserves: the target's next token, after the user's sampling options."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import SamplingConfig
from .proposal import Probs

Logits = npt.NDArray[np.float32]

_BLOCK = 512
"""Weights whose sum `sample` looks at before it looks at them one by one."""
_SAMPLE = 4096
"""Weights from which the place of the smallest one in top-p is guessed."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How a drafter draws its pieces: as the target its tokens, but for the penalty."""

    sampling: SamplingConfig
    """With a temperature above 0."""
    rng: np.random.Generator


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
        at = rng.random() * self.total
        index = _first_above(self._sums, at)
        if not self._is_long:
            return index
        if index:
            at -= self._sums[index - 1]
        block = self._weights[index * _BLOCK : (index + 1) * _BLOCK]
        within = _first_above(np.cumsum(block, dtype=sum_type(block)), at)
        return index * _BLOCK + within


def sample(weights: Probs, rng: np.random.Generator) -> int:
    """An index, drawn with probability proportional to its weight; see `Sampler`."""
    return Sampler(weights).draw(rng)


def to_weights(logits: Logits, config: SamplingConfig) -> Probs:
    """``[n]`` probabilities up to a factor.

    In the order of Hugging Face's processors: temperature, top-k, top-p, min-p.
    """
    weights: Probs = np.subtract(logits, logits.max(initial=-np.inf), dtype=np.float32)
    if config.temperature != 1.0:
        weights *= np.float32(1 / config.temperature)
    np.exp(weights, out=weights)
    if config.top_k:
        keep_top_k(weights, config.top_k)
    if config.top_p < 1.0:
        keep_top_p(weights, config.top_p)
    if config.min_p > 0.0:
        _zero_below(weights, config.min_p * weights.max(initial=0.0))
    return weights


class TargetLaw:
    """Turns rows of the target's logits into its laws and choices.

    Follows the context where a repetition penalty depends on it.
    """

    def __init__(self, config: SamplingConfig, context: Sequence[int]) -> None:
        """The law of `config` after `context`."""
        self._config = config
        self._seen: set[int] = set()
        self._has_penalty = config.repetition_penalty != 1.0
        self.observe(context)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context."""
        if self._has_penalty:
            self._seen.update(token_ids)

    def rows(self, logits: Logits, draft_ids: Sequence[int]) -> "TargetRows":
        """The laws of rows of logits, of which row i has the first i drafts in its context.

        Args:
            logits: ``[drafts + 1, vocab]``; must stay as they are while the rows are used.
            draft_ids: Draft tokens that were scored.

        Raises:
            ValueError: there is not one row more than drafts.
        """
        if len(logits) != len(draft_ids) + 1:
            raise ValueError(
                f"{len(draft_ids)} drafts need {len(draft_ids) + 1} rows of logits, "
                f"got {len(logits)}"
            )
        seen = self._seen if self._has_penalty else None
        return TargetRows(self._config, logits, draft_ids, seen)


class TargetRows:
    """The target's laws at every draft token of a round and after the last; made when asked."""

    def __init__(
        self,
        config: SamplingConfig,
        logits: Logits,
        draft_ids: Sequence[int],
        seen: set[int] | None,
    ) -> None:
        self._config = config
        self._raw = logits
        self._draft_ids = draft_ids
        self._seen = seen

    def choice(self, row: int) -> int:
        """The likeliest token; of equal ones the lowest id."""
        return int(self._logits(row).argmax())

    def weights(self, row: int) -> Probs:
        """``[vocab]`` probabilities up to a factor."""
        return to_weights(self._logits(row), self._config)

    def _logits(self, row: int) -> Logits:
        logits: Logits = self._raw[row]
        if self._seen is None:
            return logits
        ids = self._seen_ids
        new = [i for i in self._draft_ids[:row] if i not in self._seen]
        if new:
            ids = np.union1d(ids, np.array(new, np.int64))
        penalised = logits.copy()
        scores = logits[ids]
        penalty = np.float32(self._config.repetition_penalty)
        penalised[ids] = np.where(scores < 0, scores * penalty, scores / penalty)
        return penalised

    @cached_property
    def _seen_ids(self) -> npt.NDArray[np.int64]:
        return np.array(sorted(self._seen or ()), np.int64)


def keep_top_k(weights: Probs, top_k: int) -> None:
    """Set all but the `top_k` largest weights to 0; those equal to the last one stay."""
    if top_k < len(weights):
        likely = _at_least(weights, _floor(weights, top_k))
        rank = len(likely) - top_k
        _zero_below(weights, np.partition(likely, rank)[rank])


def keep_top_p(weights: Probs, top_p: float) -> None:
    """Keep the fewest largest weights whose share reaches `top_p`, of equal ones the lowest ids.

    At least one stays. Only weights near the smallest one that stays are sorted.
    """
    whole = total(weights)
    if not whole > 0:
        return
    needed = top_p * whole
    for low, high in _brackets(weights, top_p):
        above = total(weights * (weights > high)) if high < np.inf else np.float64(0)
        falling = _at_least(weights, low)
        if high < np.inf:
            falling = falling[falling <= high]
        falling = np.sort(falling)[::-1]
        sums = np.cumsum(falling, dtype=np.float64)
        sums += above
        if above < needed and len(sums) and sums[-1] >= needed:
            break
    num_kept = max(1, int((sums - falling).searchsorted(needed)))
    least = falling[num_kept - 1]
    num_equal = num_kept - int(np.count_nonzero(falling > least))
    surplus = np.flatnonzero(weights == least)[num_equal:]
    _zero_below(weights, least)
    weights[surplus] = 0.0


def _brackets(weights: Probs, top_p: float) -> Iterator[tuple[Any, Any]]:
    """Bounds between which the smallest weight that stays may lie; in the last ones it does."""
    likely = _floor(weights, len(weights) // (2 * _BLOCK))
    if np.count_nonzero(weights >= likely) <= _SAMPLE:
        yield likely, np.inf
    if len(weights) > 4 * _SAMPLE:
        falling = np.sort(weights[:: len(weights) // _SAMPLE])[::-1]
        sums = np.cumsum(falling, dtype=np.float64)
        rank = int(sums.searchsorted(top_p * sums[-1]))
        margin = _SAMPLE // 32
        yield (
            falling[rank + margin] if rank + margin < len(falling) else 0.0,
            falling[rank - margin] if rank >= margin else np.inf,
        )
    yield 0.0, np.inf


def _floor(weights: Probs, count: int) -> Any:
    """A weight that at least `count` are not below, and mostly few more.

    The largest of each block are looked at: as many as `count` weights are not below the
    `count`-th of them.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    rank = len(starts) - count
    if rank < 0 or count < 1:
        return 0.0
    return np.partition(np.maximum.reduceat(weights, starts), rank)[rank]


def _at_least(weights: Probs, low: Any) -> Probs:
    """The weights not below `low`, and none that is 0.

    Indexing with a mask would be slow where many are meant.
    """
    return weights.take(np.flatnonzero(weights >= low if low > 0 else weights))


def _zero_below(weights: Probs, low: Any) -> None:
    np.multiply(weights, weights >= low, out=weights)


def _first_above(sums: Probs, at: object) -> int:
    """First of rising sums above `at`; where rounding leaves none, the first of the largest."""
    index = int(sums.searchsorted(at, side="right"))  # type: ignore[call-overload]
    return index if index < len(sums) else int(sums.searchsorted(sums[-1], side="left"))
