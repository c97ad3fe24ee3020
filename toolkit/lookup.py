"""Prompt lookup: what followed the last occurrence of the context's latest n-gram."""

from collections.abc import Sequence

from .proposal import Proposal, Stop
from .sampling import Draw
from .speculative import DraftControl

_NUM_RECENT = 8


class PromptLookup:
    """A proposer without a model: the context repeats itself, so its own past is a draft.

    Works on target ids. Of the n-grams that end the context, the longest that occurred
    before counts, and of its occurrences the most recent. An index of n-grams grows
    with the context, so a round costs the same at any length.

    Source:
        Saxena 2023, "Prompt lookup decoding" (there the first occurrence counts).
    """

    def __init__(self, *, min_ngram: int = 1, max_ngram: int = 4) -> None:
        """Look for n-grams of `max_ngram` down to `min_ngram` tokens.

        Raises:
            ValueError: not ``1 <= min_ngram <= max_ngram``.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams of {min_ngram} to {max_ngram} tokens")
        self._sizes = range(min_ngram, max_ngram + 1)
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}
        """n-gram -> position after its last occurrence that has a token after it."""
        self._replaced: list[list[int | None]] = []
        """Per token what its n-grams stood for before, so that it can be taken back."""

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context; what it shares with the old stays indexed."""
        shared = 0
        for ours, theirs in zip(self._tokens, context, strict=False):
            if ours != theirs:
                break
            shared += 1
        while len(self._tokens) > shared:
            self._take_back()
        self.observe(context[shared:])

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided."""
        for token_id in token_ids:
            at, replaced = len(self._tokens), []
            for ngram in self._ngrams():
                replaced.append(self._followers.get(ngram))
                self._followers[ngram] = at
            self._replaced.append(replaced)
            self._tokens.append(int(token_id))

    def propose(
        self,
        max_draft_tokens: int,
        draw: Draw | None = None,
        control: DraftControl | None = None,
    ) -> Proposal:
        """The tokens after the match; empty where there is none.

        A match that overlaps the end of the context goes on as a repetition.
        """
        at, num_matched = self.match()
        if at is None or max_draft_tokens < 1:
            return Proposal.EMPTY
        length = max_draft_tokens
        stop: Stop = "budget"
        if control is not None:
            length, stop = control.lookup_length(num_matched)
        tail = self._tokens[at : at + length]
        repeated = (tail[i % len(tail)] for i in range(length))
        return Proposal(token_ids=tuple(repeated), source="lookup", stop=stop)

    @property
    def recent(self) -> list[int]:
        """The last tokens of the context, at most 8."""
        return self._tokens[-_NUM_RECENT:]

    def match(self) -> tuple[int | None, int]:
        """Position of the first token to propose, and how many tokens matched before it."""
        for ngram in reversed(self._ngrams()):
            at = self._followers.get(ngram)
            if at is not None:
                return at, len(ngram)
        return None, 0

    def _ngrams(self) -> list[tuple[int, ...]]:
        """The n-grams that end the context, shortest first."""
        length = len(self._tokens)
        recent = tuple(self._tokens[max(0, length - self._sizes[-1]) :])
        return [recent[len(recent) - n :] for n in self._sizes if n <= length]

    def _take_back(self) -> None:
        """Drop the last token of the context."""
        self._tokens.pop()
        for ngram, before in zip(self._ngrams(), self._replaced.pop(), strict=True):
            if before is None:
                del self._followers[ngram]
            else:
                self._followers[ngram] = before
