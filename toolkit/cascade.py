"""Cascade of proposers: the context's own past where it surely repeats itself, else a model."""

from collections.abc import Sequence

from .lookup import PromptLookup
from .proposal import Proposal
from .speculative import Proposer


class Cascade:
    """Prompt lookup where its match is long enough, and otherwise another proposer.

    A round that lookup serves costs no drafter pass: the other proposer is only told
    what the target decided, and catches up when it is asked next.
    """

    def __init__(self, lookup: PromptLookup, fallback: Proposer, *, min_match: int = 4) -> None:
        """Ask `lookup` where at least `min_match` tokens match, and `fallback` otherwise.

        Both belong to this object from now on.
        """
        self._lookup = lookup
        self._fallback = fallback
        self._min_match = min_match

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context."""
        self._lookup.begin(context)
        self._fallback.begin(context)

    def propose(self, max_draft_tokens: int) -> Proposal:
        """A proposal of lookup or of the other; empty where that one has none."""
        _, length = self._lookup.match()
        chosen = self._lookup if length >= self._min_match else self._fallback
        return chosen.propose(max_draft_tokens)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided."""
        self._lookup.observe(token_ids)
        self._fallback.observe(token_ids)
