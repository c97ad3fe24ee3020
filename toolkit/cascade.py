"""Cascade of proposers: what came before where it is the better draft, else a model."""

from collections.abc import Sequence

from .lookup import PromptLookup
from .past_answers import Foretold, PastAnswers
from .proposal import Proposal, Stop
from .sampling import Draw
from .speculative import DraftControl, Proposer

_FALLBACK = 0
_FIRST_GUESS = {_FALLBACK: 0.4, 1: 0.2, 2: 0.5, 3: 0.65, 4: 0.8}
"""Share of a round's drafts that may be accepted, by tokens matched, before any were seen."""
_RATE = 0.2
"""Weight of the last round in what is expected of the next."""


class Cascade:
    """Lookup where it promises at least as much as another proposer, else that one.

    What is looked up is what followed earlier in the context, or in answers of before.

    What is promised is the share of drafts that was accepted lately in this context, kept for
    each length of a match and for the other proposer; answers of before say themselves how far
    they are to be trusted. A round that lookup serves costs no drafter pass: the other is only
    told what the target decided, and catches up when it is asked next.
    """

    def __init__(
        self, lookup: PromptLookup, fallback: Proposer, past: PastAnswers | None = None
    ) -> None:
        """Choose between these.

        Args:
            lookup: Belongs to this object from now on.
            fallback: As well.
            past: Answers of the same target; they may grow between two answers.
        """
        self._lookup = lookup
        self._fallback = fallback
        self._past = past
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
        foretold = self._foretold(max_draft_tokens)
        if control is not None:
            if foretold is not None and control.prefers_past(foretold.acceptance, num_matched):
                length, stop = control.past_length(foretold.acceptance)
                return _proposal(foretold.token_ids[:length], stop)
            asked = self._lookup if control.prefers_lookup(num_matched) else self._fallback
            return asked.propose(max_draft_tokens, draw, control)
        choice = min(num_matched, max(self._expected))
        if self._expected[choice] < self._expected[_FALLBACK]:
            choice = _FALLBACK
        share = 0.0 if foretold is None else foretold.share_of(max_draft_tokens)
        if foretold is not None and share >= self._expected[choice]:
            return _proposal(foretold.token_ids, "budget")
        chosen = self._fallback if choice == _FALLBACK else self._lookup
        self._choice, self._budget = choice, max_draft_tokens
        self._draft = chosen.propose(max_draft_tokens, draw)
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

    def _foretold(self, max_draft_tokens: int) -> Foretold | None:
        if self._past is None or max_draft_tokens < 1:
            return None
        return self._past.after(self._lookup.recent, max_draft_tokens)

    def _forget(self) -> None:
        self._expected = dict(_FIRST_GUESS)
        self._begin_round()

    def _begin_round(self) -> None:
        self._draft, self._budget, self._choice = Proposal.EMPTY, 0, _FALLBACK


def _proposal(token_ids: tuple[int, ...], stop: Stop) -> Proposal:
    """Tokens of answers of before, each with certainty."""
    return Proposal(token_ids=token_ids, source="past", stop=stop)
