"""The law that decoding preserves: the target's next token, after the user's sampling options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import SamplingConfig
from .peaks import Peaks
from .proposal import Probs
from .token_law import TokenLaw, running_sums, total

Logits = npt.NDArray[np.float32]

_SPREAD = 2000
"""Mostly no token is kept whose probability is below what top-p leaves out, divided by this."""
_SLACK = 1e-3
"""Below a bound in logits, for what rounding does to them; weights then decide."""
_LEAST = 1e-5
"""With options that leave tokens out, a drafter draws no piece whose share of the likeliest one's
probability is below this."""
_LEAST_OF_REST = 0.01
"""The same, of what top-p leaves out; pieces below it are hardly ever among those that it keeps."""
_COLDEST, _HOTTEST = 1e-30, 1e30
"""Below the one only the likeliest token is drawn, and above the other all are equally likely."""
_HIGH = 60.0
"""Where the largest logit is within this of 0, its exponential is a weight as it is."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How a drafter draws its pieces: as the target its tokens, but for the penalty."""

    sampling: SamplingConfig
    """With a temperature above 0."""
    rng: np.random.Generator


def to_weights(logits: Logits, config: SamplingConfig) -> Probs:
    """``[n]`` probabilities up to a factor.

    In the order of Hugging Face's processors: temperature, top-k, top-p, min-p.
    """
    high = logits.max(initial=-np.inf)
    weights = _exponentials(logits, _shift(high, config), _temperature(config))
    _narrow(weights, config, None)
    return weights


def near_law(logits: Logits, config: SamplingConfig) -> TokenLaw:
    """The law that `to_weights` gives, about, in less time; what a drafter draws from."""
    if not leaves_out(config):
        return TokenLaw(to_weights(logits, config))
    high = logits.max(initial=-np.inf)
    least = max(_LEAST, _LEAST_OF_REST * (1 - config.top_p), config.min_p)
    ids = (logits >= high + _temperature(config) * math.log(least)).nonzero()[0]
    weights = _exponentials(logits[ids], _shift(high, config), _temperature(config))
    if len(ids) and (config.top_k or config.top_p < 1.0):
        rising = np.sort(weights)[-config.top_k :]
        if config.top_p < 1.0:
            sums = running_sums(rising)
            rest = (1.0 - config.top_p) * sums.item(-1)
            rising = rising[int(sums[:-1].searchsorted(rest, side="right")) :]
        _zero_below(weights, rising.item(0))
    return TokenLaw(weights, ids, len(logits))


def token_law(logits: Logits, config: SamplingConfig) -> TokenLaw:
    """The law that `to_weights` gives, mostly without looking at unlikely tokens one by one."""
    if not leaves_out(config):
        return TokenLaw(to_weights(logits, config))
    peaks = Peaks(logits)
    shift = _shift(peaks.max, config)
    whole: Any = None
    if config.top_k:
        bound = peaks.floor(config.top_k)
    elif config.top_p < 1.0:
        whole = np.add.reduce(_exponentials(logits, shift, _temperature(config)))
        least = (1.0 - config.top_p) * float(whole) / _SPREAD
        bound = shift + _temperature(config) * math.log(least) if least > 0 else -np.inf
    else:
        bound = peaks.max + _temperature(config) * math.log(config.min_p)
    ids = peaks.at_least(bound - _SLACK)
    weights = _exponentials(logits[ids], shift, _temperature(config))
    if whole is not None and total(weights) < config.top_p * whole:
        return TokenLaw(to_weights(logits, config))
    _narrow(weights, config, whole)
    kept = np.flatnonzero(weights)
    return TokenLaw(weights[kept], ids[kept], len(logits))


def leaves_out(config: SamplingConfig) -> bool:
    """Whether options leave out tokens."""
    return bool(config.top_k or config.top_p < 1.0 or config.min_p > 0.0)


def _temperature(config: SamplingConfig) -> float:
    """The temperature, or one with the same law whose inverse single precision can hold."""
    return min(max(config.temperature, _COLDEST), _HOTTEST)


def _shift(high: Any, config: SamplingConfig) -> Any:
    """What is taken from logits of which `high` is the largest: nothing where that is spared."""
    return np.float32(0) if abs(high) < _HIGH * _temperature(config) else high


def _exponentials(logits: Logits, shift: Any, temperature: float) -> Probs:
    """Weights, of which that of the logit `shift` is 1."""
    weights = np.empty(len(logits), np.float32)
    moved = np.subtract(logits, shift, out=weights) if shift else logits
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # A logit that is far below the largest becomes -inf.
            moved = np.multiply(moved, np.float32(1 / temperature), out=weights)
    return np.exp(moved, out=weights)


def _narrow(weights: Probs, config: SamplingConfig, whole: Any) -> None:
    """Set the weights that the options rule out to 0; `whole` is what top-p is a share of."""
    if config.top_k:
        keep_top_k(weights, config.top_k)
    if config.top_p < 1.0:
        keep_top_p(weights, config.top_p, whole)
    if config.min_p > 0.0:
        _zero_below(weights, config.min_p * weights.max(initial=0.0))


class TargetLaw:
    """Turns rows of the target's logits into its laws and choices.

    Follows the context where a repetition penalty depends on it.
    """

    def __init__(self, config: SamplingConfig, context: Sequence[int]) -> None:
        """The law of `config` after `context`."""
        self._config = config
        self._seen: set[int] = set()
        self._seen_ids = np.empty(0, np.int64)
        self._has_penalty = config.repetition_penalty != 1.0
        self.observe(context)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context."""
        if self._has_penalty and (new := set(token_ids) - self._seen):
            self._seen |= new
            self._seen_ids = np.append(self._seen_ids, np.fromiter(new, np.int64, len(new)))

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
        seen = self._seen_ids if self._has_penalty else None
        return TargetRows(self._config, logits, draft_ids, seen)


class TargetRows:
    """The target's laws at every draft token of a round and after the last; made when asked."""

    def __init__(
        self,
        config: SamplingConfig,
        logits: Logits,
        draft_ids: Sequence[int],
        seen: npt.NDArray[np.int64] | None,
    ) -> None:
        self._config = config
        self._raw = logits
        self._draft_ids = draft_ids
        self._seen = seen

    def choice(self, row: int) -> int:
        """The likeliest token; of equal ones the lowest id."""
        return int(self._logits(row).argmax())

    def law(self, row: int) -> TokenLaw:
        """The law of the next token."""
        return token_law(self._logits(row), self._config)

    def weights(self, row: int) -> Probs:
        """``[vocab]`` probabilities up to a factor."""
        return self.law(row).dense

    def _logits(self, row: int) -> Logits:
        logits: Logits = self._raw[row]
        if self._seen is None:
            return logits
        ids = self._seen
        if row:
            ids = np.union1d(ids, np.array(self._draft_ids[:row], np.int64))
        penalised = logits.copy()
        scores = logits[ids]
        penalty = np.float32(self._config.repetition_penalty)
        penalised[ids] = np.where(scores < 0, scores * penalty, scores / penalty)
        return penalised


def keep_top_k(weights: Probs, top_k: int) -> None:
    """Set all but the `top_k` largest weights to 0; those equal to the last one stay."""
    rank = len(weights) - top_k
    if rank > 0:
        _zero_below(weights, np.partition(weights, rank)[rank])


def keep_top_p(weights: Probs, top_p: float, whole: Any = None) -> None:
    """Keep the fewest largest weights whose share reaches `top_p`, of equal ones the lowest ids.

    At least one stays. The share is of `whole`, None for their sum.
    """
    whole = total(weights) if whole is None else whole
    if not whole > 0:
        return
    falling = np.sort(weights)[::-1]
    sums = np.cumsum(falling, dtype=np.float64)
    num_kept = max(1, int((sums - falling).searchsorted(top_p * whole)))
    least = falling[num_kept - 1]
    num_equal = num_kept - int(np.count_nonzero(falling > least))
    surplus = np.flatnonzero(weights == least)[num_equal:]
    _zero_below(weights, least)
    weights[surplus] = 0.0


def _zero_below(weights: Probs, low: Any) -> None:
    np.multiply(weights, weights >= low, out=weights)
