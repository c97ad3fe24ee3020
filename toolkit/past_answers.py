"""Answers of before as drafts: what followed there where the same tokens had come before it."""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_TOKENS = 32_768
"""Of all answers together, some 270 of usual length; they take about 7 MB in memory."""

_SIZES = (2, 4, 6)
"""Tokens of the n-grams that are looked for; the longest that is found counts."""
_END = -1
"""Stands after every answer, so that no draft goes on into the next one."""
_KEPT = 0.9
"""Weight of the answers so far after another one, in how often drafts were right."""
_GUESS, _GUESS_WEIGHT = 0.3, 20.0
"""How often they are right, and of how many drafts that is worth, before any answer was seen."""
_PRUDENCE = 0.1
"""Taken from what was found: where the best of several is chosen, it mostly promises too much."""


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """What followed the last tokens of a context when they came before."""

    token_ids: tuple[int, ...]
    """At least one."""
    acceptance: float
    """Probability that a token of them is right where all before it were; below 1."""

    def share_of(self, budget: int) -> float:
        """Share of so many drafts, at least 1, that may be accepted."""
        survival, accepted = 1.0, 0.0
        for _ in self.token_ids:
            survival *= self.acceptance
            accepted += survival
        return accepted / budget


class PastAnswers:
    """Answers of one target, in its tokens, indexed by the n-grams in them.

    An answer is foretold by those before it, token by token, as it is added: that tells how
    far a match of each length is to be trusted where answers are like the latest ones.
    Nothing changes while an answer is written, so drafts depend on its context alone.

    Source:
        He et al. 2023, "REST", arXiv:2311.08252, for drafts from a store of texts.
    """

    def __init__(self, *, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        """Keep at most `max_tokens` tokens, and at least one answer; the oldest answers go."""
        self._max_tokens = max_tokens
        self._right = dict.fromkeys(_SIZES, 0.0)
        self._tested = dict.fromkeys(_SIZES, 0.0)
        self._index(())

    def __len__(self) -> int:
        """Tokens that are kept, and an end for each answer."""
        return len(self._tokens)

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep an answer, after it was seen how well those before foretold it."""
        if not token_ids:
            return
        self._judge(token_ids)
        room = self._max_tokens - len(token_ids) - 1
        if len(self) > room:
            # Half at once, so that an index is made anew only now and then.
            start = len(self) - max(0, min(room, self._max_tokens // 2))
            while start < len(self) and self._tokens[start - 1] != _END:
                start += 1
            self._index(self._tokens[start:])
        self._append([*token_ids, _END])

    def after(self, context: Sequence[int], length: int) -> Foretold | None:
        """Up to `length` tokens that followed the end of a context; None where none did.

        Args:
            context: Target ids; its last 6 are enough.
            length: At least 1.
        """
        at, size = self._find(context)
        if not size:
            return None
        token_ids = self._tokens[at : at + length]
        if _END in token_ids:
            token_ids = token_ids[: token_ids.index(_END)]
        return Foretold(token_ids=tuple(token_ids), acceptance=self._acceptance(size))

    def _find(self, context: Sequence[int]) -> tuple[int, int]:
        """Where the latest occurrence of the longest n-gram goes on, and its length, else 0."""
        for size in reversed(_SIZES):
            if size <= len(context):
                ngram = tuple(context[-size:])
                at = self._followers.get(hash(ngram))
                if at is not None and tuple(self._tokens[at - size : at]) == ngram:
                    return at, size
        return 0, 0

    def _acceptance(self, size: int) -> float:
        tested = self._tested[size] + _GUESS_WEIGHT
        return max(0.0, (self._right[size] + _GUESS_WEIGHT * _GUESS) / tested - _PRUDENCE)

    def _judge(self, token_ids: Sequence[int]) -> None:
        for counts in (self._right, self._tested):
            for size in _SIZES:
                counts[size] *= _KEPT
        for i in range(1, len(token_ids)):
            at, size = self._find(token_ids[max(0, i - _SIZES[-1]) : i])
            if size:
                self._tested[size] += 1
                self._right[size] += self._tokens[at] == token_ids[i]

    def _index(self, token_ids: Sequence[int]) -> None:
        """Keep exactly these tokens of whole answers, each with its end."""
        self._tokens: list[int] = []
        self._followers: dict[int, int] = {}
        """Hash of an n-gram -> position after its last occurrence that has a token after it."""
        self._append(token_ids)

    def _append(self, token_ids: Sequence[int]) -> None:
        first = len(self._tokens)
        self._tokens += token_ids
        for size in _SIZES:
            for at in range(max(first, size), len(self._tokens)):
                if self._tokens[at] != _END:
                    self._followers[hash(tuple(self._tokens[at - size : at]))] = at
