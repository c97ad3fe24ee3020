"""Cascade of proposers: the context's own past where it is the better draft, else a model."""

from collections.abc import Sequence

from .lookup import PromptLookup
from .proposal import Proposal
from .sampling import Draw
from .speculative import DraftControl, Proposer

_FALLBACK = 0
_FIRST_GUESS = {_FALLBACK: 0.4, 1: 0.2, 2: 0.5, 3: 0.65, 4: 0.8}
"""Share of a round's drafts that may be accepted, by tokens matched, before any were seen."""
_RATE = 0.2
"""Weight of the last round in what is expected of the next."""


class Cascade:
    """Prompt lookup where it promises at least as much as another proposer, else that one.

    What is promised is the share of drafts that was accepted lately in this context, kept for
    each length of a match and for the other proposer. A round that lookup serves costs
    no drafter pass: the other is only told what the target decided, and catches up when
    it is asked next.
    """

    def __init__(self, lookup: PromptLookup, fallback: Proposer) -> None:
        """Choose between these; both belong to this object from now on."""
        self._lookup = lookup
        self._fallback = fallback
        self._forget()

    def begin(self, context: Sequence[int]) -> None:
        """Follow a new context; what was learned of proposers in the old is forgotten."""
        self._lookup.begin(context)
        self._fallback.begin(context)
        self._forget()

    def propose(
        self,
        max_draft_tokens: int,
        draw: Draw | None = None,
        control: DraftControl | None = None,
    ) -> Proposal:
        """A proposal of lookup or of the other; empty where that one has none.

        With `control` it has the choice, and what is expected here stays as it is.
        """
        _, num_matched = self._lookup.match()
        if control is not None:
            asked = self._lookup if control.prefers_lookup(num_matched) else self._fallback
            return asked.propose(max_draft_tokens, draw, control)
        self._choice = min(num_matched, max(self._expected))
        if self._expected[self._choice] < self._expected[_FALLBACK]:
            self._choice = _FALLBACK
        chosen = self._fallback if self._choice == _FALLBACK else self._lookup
        self._draft = chosen.propose(max_draft_tokens, draw)
        self._budget = max_draft_tokens
        return self._draft

    def observe(self, token_ids: Sequence[int]) -> None:
        """Extend the context by what the target decided."""
        if self._budget > 0:
            accepted = 0
            for draft, decided in zip(self._draft.token_ids, token_ids, strict=False):
                if draft != decided:
                    break
                accepted += 1
            share = accepted / self._budget
            self._expected[self._choice] += _RATE * (share - self._expected[self._choice])
        self._begin_round()
        self._lookup.observe(token_ids)
        self._fallback.observe(token_ids)

    def _forget(self) -> None:
        self._expected = dict(_FIRST_GUESS)
        self._begin_round()

    def _begin_round(self) -> None:
        self._draft, self._budget, self._choice = Proposal.EMPTY, 0, _FALLBACK
