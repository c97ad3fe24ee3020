"""How long drafts are: another piece is drafted where it promises more time than it costs."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .acceptance import Calibration, PlaceAcceptance, confidence
from .acceptance_head import AcceptanceHead
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


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Of one round, in seconds."""

    drafting: Floats
    """``[max + 1]`` of so many pieces."""
    rest: Floats
    """``[max + 1]`` of the round after so many pieces were drafted."""
    rest_of_lookup: Floats
    """The same after so many tokens of lookup."""
    worth: float
    """Of one more accepted piece."""


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
        rest = self._costs.rest_of_lookup
        return _best(acceptance, rest, rest[0])[1] > max(0.0, self._switch.saved_s or 0.0)

    def lookup_length(self, num_matched: int) -> tuple[int, Stop]:
        """How many tokens of lookup are proposed, and why not more."""
        self._num_matched = num_matched
        acceptance = self._matched(num_matched)
        if self._costs is None:
            length = min(_UNMEASURED_LENGTH, len(acceptance))
        else:
            worth = self._costs.worth / self._tokens_per_piece
            length, gain = _best(acceptance, self._costs.rest_of_lookup, worth)
            if gain <= 0:
                return 0, "cost"
        return length, "budget" if length == len(acceptance) else "cost"

    def before_pass(self) -> Stop | None:
        """Why the drafter is not asked for another piece; None where it is."""
        self._marks.append(self._clock())
        num = len(self._probs)
        if self._costs is None:
            return self._unmeasured(num)
        if num == 0:
            return None if self._switch.begin_round(self._costs.rest[0]) else "off"
        if num < self._switch.min_length or self._gain_of_pass(num) > 0:
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
        if self._costs is not None and num >= self._switch.min_length:
            rest = self._costs.rest
            gain = self._costs.worth * survival - (rest[num + 1] - rest[num])
            if gain + max(0.0, self._gain(num + 1, survival)) <= 0:
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
        self._observe_drafting(proposal, draft_s)
        if self._costs is not None and self._was_followed:
            num = len(self._probs) + (self._left_out is not None)
            spent_s = self._costs.drafting[num] + float(self._times.rest(np.array([num_tokens]))[0])
            plain_s = len(verdict.token_ids) * self._costs.rest[0]
            self._switch.observe(plain_s - spent_s)
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

    def _observe_drafting(self, proposal: Proposal, draft_s: float) -> None:
        """Learn the times of passes from when each began."""
        if not self._marks or proposal.stop in ("off", "trial"):
            self._was_followed = False
            return
        gaps = np.diff(self._marks)[1:].tolist()
        # A model that was not asked for some rounds has much to catch up with at first.
        first = draft_s - sum(gaps) if self._was_followed else None
        self._times.observe_drafting(gaps, first)
        self._was_followed = True

    def _measured_costs(self, length: int) -> _Costs | None:
        """None as long as times are not known."""
        times = self._times
        if times.num_plain < _UNMEASURED_PLAIN or times.num_drafted < _UNMEASURED_PLAIN:
            return None
        numbers = np.arange(length + 1.0)
        drafting, rest = times.drafting(length), times.rest(numbers * self._tokens_per_piece)
        pieces = np.append(0.0, self._acceptance.cumprod().cumsum())
        per_token = (drafting + rest) / (1 + self._tokens_per_piece * pieces)
        return _Costs(
            drafting=drafting,
            rest=rest,
            rest_of_lookup=times.rest(numbers),
            worth=float(per_token.min()) * self._tokens_per_piece,
        )

    def _gain_of_pass(self, num: int) -> float:
        """Seconds that another pass is expected to gain after `num` pieces.

        The better of two ways to go on: to draft a certain number of pieces, or one which
        is left out if it turns out to promise less than it costs to verify.
        """
        costs = self._costs
        assert costs is not None, "asked only where times are known"
        worth = costs.worth * self._survival
        gains = worth * np.array(self._recent) - (costs.rest[num + 1] - costs.rest[num])
        gain_of_one = float(np.maximum(gains, 0).mean())
        gain_of_one -= costs.drafting[num + 1] - costs.drafting[num]
        return max(gain_of_one, self._gain(num, self._survival))

    def _gain(self, num: int, survival: float) -> float:
        """Seconds that the best number of further pieces is expected to gain after `num`."""
        costs = self._costs
        assert costs is not None, "asked only where times are known"
        total = costs.drafting[num:] + costs.rest[num:]
        return _best(self._acceptance[num:], total, costs.worth * survival)[1]

    def _matched(self, num_matched: int) -> Floats:
        return self._by_match[min(num_matched, max(self._by_match))].expected(len(self._acceptance))

    def _unmeasured(self, num: int) -> Stop | None:
        if num == 0:
            is_plain_due = self._times.num_plain < min(_UNMEASURED_PLAIN, self._times.num_drafted)
            return "trial" if is_plain_due else None
        if num >= _UNMEASURED_LENGTH:
            return "budget"
        return "unlikely" if self._survival < _MIN_SURVIVAL else None


def _best(acceptance: Floats, costs: Floats, worth: float) -> tuple[int, float]:
    """The number of drafts, at least one, of the largest expected gain, and that gain.

    Args:
        acceptance: ``[n]`` conditional acceptance of each.
        costs: ``[n + 1]`` seconds with so many; only differences count.
        worth: Seconds that one accepted draft is worth.
    """
    if not len(acceptance):
        return 0, 0.0
    gains = worth * acceptance.cumprod().cumsum() - (costs[1:] - costs[0])
    best = int(gains.argmax())
    return best + 1, float(gains[best])
