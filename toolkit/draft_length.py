"""How long drafts are: another piece is drafted where it promises more time than it costs."""

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .acceptance import Calibration, PlaceAcceptance, confidence
from .acceptance_head import AcceptanceHead
from .draft_costs import RoundCosts, best_length
from .draft_switch import DraftSwitch
from .draft_times import DraftTimes, Floats
from .proposal import Proposal, Stop
from .verification import Verdict

_MODEL_GUESS = 0.6
_LOOKUP_GUESSES = {1: 0.2, 2: 0.5, 3: 0.65, 4: 0.8}
"""Conditional acceptance before any draft was tested, by tokens matched."""
_UNMEASURED_LENGTH = 4
"""Most pieces of a round as long as times are not known."""
_UNMEASURED_PLAIN = 2
"""Rounds without drafts that are made to learn what they cost."""
_MIN_SURVIVAL = 0.3
"""Least probability that all drafts are accepted, as long as times are not known."""
_RATIO_RATE = 0.1
"""Weight of the last round in how many tokens a piece makes."""
_NUM_RECENT = 64
"""Latest pieces whose expected acceptance tells how the next ones will vary."""


class DraftLength:
    """Decides how much is drafted, round by round and piece by piece.

    Drafting goes on while some number of further pieces has an expected gain above its
    cost. A piece gains the time that its token would take otherwise, times the probability
    that it and all before it are accepted; it costs its drafting and the longer rest of the
    round. A token is worth the time of a round, divided by the tokens it gives, at the
    length that makes this least. Where drafting saved nothing in the latest rounds, the
    target decodes plainly (`DraftSwitch`).

    What a decision looks at was known before the piece in question was drawn, so the
    target's law is kept.
    """

    def __init__(
        self,
        *,
        head: AcceptanceHead | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Learn the times and the acceptance of one pair of models.

        Args:
            head: Tells the acceptance of a piece from the drafter's hidden state. It is weighed
                with the drafter's confidence by what is found; without it there is only that.
            clock: Seconds.
        """
        self.head = head
        self._clock = clock
        self._times = DraftTimes()
        self._by_place = PlaceAcceptance(_MODEL_GUESS)
        self._calibration = Calibration()
        self._recent: deque[float] = deque([_MODEL_GUESS], maxlen=_NUM_RECENT)
        self._switch = DraftSwitch()
        self._tokens_per_piece = 1.0
        self._was_followed = True
        self.begin()

    def begin(self) -> None:
        """Begin a response; how well lookup serves is a matter of its text."""
        self._by_match = {n: PlaceAcceptance(guess) for n, guess in _LOOKUP_GUESSES.items()}
        self._switch.begin()
        self.begin_round(0)

    def begin_round(self, max_draft_tokens: int) -> None:
        """Begin a round of at most so many pieces, or tokens of lookup."""
        self._marks: list[float] = []
        self._probs: list[float] = []
        """Expected acceptance of each piece that is drawn."""
        self._guesses: list[list[float]] = []
        """What the drafter's confidence said of them, and the head."""
        self._left_out: float | None = None
        self._survival = 1.0
        self._num_matched = 0
        self._acceptance = self._by_place.expected(max_draft_tokens)
        self._costs = self._measured_costs(max_draft_tokens)

    def prefers_lookup(self, num_matched: int) -> bool:
        """Whether what followed a match of so many tokens promises more than the model."""
        if not num_matched:
            return False
        acceptance = self._matched(num_matched)
        if self._costs is None:
            return bool(acceptance[0] >= self._acceptance[0])
        return self._gain_of_lookup(acceptance) > max(0.0, self._switch.saved_s or 0.0)

    def lookup_length(self, num_matched: int) -> tuple[int, Stop]:
        """How many tokens of lookup are proposed, and why not more."""
        self._num_matched = num_matched
        return self._length_of_lookup(self._matched(num_matched))

    def prefers_past(self, acceptance: float, num_matched: int) -> bool:
        """Whether answers of before promise more than the model, and than such a match.

        Args:
            acceptance: Probability that a token of theirs is right, given all before it.
            num_matched: Tokens of the context's own match, 0 for none.
        """
        expected = self._of_past(acceptance)
        matched = self._matched(num_matched) if num_matched else np.zeros_like(expected)
        # What is found of answers is of those before this one: it must promise more than that
        # the tokens cost nothing.
        is_likelier = bool(expected[0] >= max(self._acceptance[0], matched[0]))
        if self._costs is None or not is_likelier:
            return is_likelier
        gain = max(self._gain_of_lookup(matched), self._switch.saved_s or 0.0)
        return self._gain_of_lookup(expected) > max(0.0, gain)

    def past_length(self, acceptance: float) -> tuple[int, Stop]:
        """How many tokens of answers of before are proposed, and why not more."""
        return self._length_of_lookup(self._of_past(acceptance))

    def before_pass(self) -> Stop | None:
        """Why the drafter is not asked for another piece; None where it is."""
        self._marks.append(self._clock())
        num = len(self._probs)
        if self._costs is None:
            return self._unmeasured(num)
        if num == 0:
            return None if self._switch.begin_round(self._costs.rest[0]) else "off"
        gain = self._costs.gain_of_pass(num, self._survival, np.array(self._recent))
        if num < self._switch.min_length or gain > 0:
            return None
        return "cost"

    def before_draw(
        self, logits: npt.NDArray[np.float32], hidden: npt.NDArray[np.float32] | None
    ) -> Stop | None:
        """Why the next piece is not drawn; None where it is.

        Args:
            logits: ``[pieces]`` that it would be drawn from.
            hidden: ``[hidden]`` state that the logits were made of, if the graph gives it.
        """
        num = len(self._probs)
        guesses = [confidence(logits)]
        if self.head is not None and hidden is not None:
            guesses.append(float(self.head.probabilities(hidden)))
        if len(guesses) != self._calibration.num_guesses:
            self._calibration = Calibration(len(guesses))
        expected = self._calibration.expected(guesses)
        survival = self._survival * expected
        self._recent.append(expected)
        costs = self._costs if num >= self._switch.min_length else None
        if costs is not None and costs.gain_of_piece(num, survival) <= 0:
            self._left_out = expected
            return "cost"
        self._survival = survival
        self._probs.append(expected)
        self._guesses.append(guesses)
        return None

    def observe(
        self, proposal: Proposal, verdict: Verdict, *, draft_s: float, rest_s: float
    ) -> None:
        """Learn from a round.

        Args:
            proposal: What was drafted.
            verdict: What the target made of it.
            draft_s: Seconds of drafting.
            rest_s: Seconds of all after it.
        """
        num_tokens = len(proposal.token_ids)
        self._times.observe_rest(num_tokens, rest_s)
        num_passes = len(self._probs) + (self._left_out is not None)
        self._observe_drafting(num_passes, draft_s)
        if self._costs is not None and num_passes:
            usual_s = float(self._times.rest(np.array([float(num_tokens)]))[0])
            spent_s = self._costs.drafting[num_passes]
            spent_s += usual_s if math.isfinite(usual_s) else rest_s
            self._switch.observe(float(len(verdict.token_ids) * self._costs.rest[0] - spent_s))
        if proposal.source == "lookup":
            key = min(self._num_matched, max(self._by_match))
            if key and num_tokens:
                self._by_match[key].observe(verdict.num_accepted, verdict.num_tested)
        elif self._probs or self._left_out is not None:
            self._observe_pieces(num_tokens, verdict)

    def _observe_pieces(self, num_tokens: int, verdict: Verdict) -> None:
        """Learn from the verdict on a model's pieces, which need not be as many as their tokens."""
        num = len(self._probs)
        accepted = tested = 0
        if num_tokens:
            ratio = num_tokens / num
            self._tokens_per_piece += _RATIO_RATE * (ratio - self._tokens_per_piece)
            is_whole = verdict.num_accepted == num_tokens
            accepted = num if is_whole else int(verdict.num_accepted / ratio)
            tested = min(num, accepted + (verdict.num_tested > verdict.num_accepted))
        left_out = self._left_out if tested == num else None
        self._by_place.observe(accepted, tested, left_out)
        for i, guesses in enumerate(self._guesses[:tested]):
            self._calibration.observe(guesses, i < accepted)

    def _observe_drafting(self, num_passes: int, draft_s: float) -> None:
        """Learn the times of passes from when each began."""
        if not num_passes:
            self._was_followed = False
            return
        gaps = np.diff(self._marks)[1:].tolist()
        first = None
        # A model that was not asked for some rounds has much to catch up with at first.
        if self._was_followed:
            # The end of the last pass is not marked where no other was considered.
            num_unmarked = num_passes - 1 - len(gaps)
            first = draft_s - sum(gaps) - num_unmarked * self._times.further_s
        self._times.observe_drafting(gaps, first)
        self._was_followed = True

    def _measured_costs(self, length: int) -> RoundCosts | None:
        """None as long as times are not known."""
        times = self._times
        if times.num_plain < _UNMEASURED_PLAIN or times.num_drafted < _UNMEASURED_PLAIN:
            return None
        numbers = np.arange(length + 1.0)
        drafting, rest = times.drafting(length), times.rest(numbers * self._tokens_per_piece)
        pieces = np.append(0.0, self._acceptance.cumprod().cumsum())
        per_token = (drafting + rest) / (1 + self._tokens_per_piece * pieces)
        return RoundCosts(
            drafting=drafting,
            rest=rest,
            rest_of_lookup=times.rest(numbers),
            acceptance=self._acceptance,
            worth=float(per_token.min()) * self._tokens_per_piece,
        )

    def _gain_of_lookup(self, acceptance: Floats) -> float:
        """Seconds that drafts without a drafter pass save, at the length that pays most."""
        assert self._costs is not None, "times are measured"
        rest = self._costs.rest_of_lookup
        return best_length(acceptance, rest, rest[0])[1]

    def _length_of_lookup(self, acceptance: Floats) -> tuple[int, Stop]:
        if self._costs is None:
            length = min(_UNMEASURED_LENGTH, len(acceptance))
        else:
            worth = self._costs.worth / self._tokens_per_piece
            length, gain = best_length(acceptance, self._costs.rest_of_lookup, worth)
            if gain <= 0:
                return 0, "cost"
        return length, "budget" if length == len(acceptance) else "cost"

    def _of_past(self, acceptance: float) -> Floats:
        return np.full(len(self._acceptance), acceptance)

    def _matched(self, num_matched: int) -> Floats:
        return self._by_match[min(num_matched, max(self._by_match))].expected(len(self._acceptance))

    def _unmeasured(self, num: int) -> Stop | None:
        if num == 0:
            is_plain_due = self._times.num_plain < min(_UNMEASURED_PLAIN, self._times.num_drafted)
            return "trial" if is_plain_due else None
        if num >= _UNMEASURED_LENGTH:
            return "budget"
        return "unlikely" if self._survival < _MIN_SURVIVAL else None
