"""What a decoded response cost and what drafting gained; every metric is defined here once."""

import copy
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .bridge.vocabulary import Vocabulary
from .memory import peak_rss_bytes
from .proposal import Stop
from .speculative import Round

NEAR_TIES = "exact but for near-ties"
"""What drafted text is where a token's numbers depend on how many are scored with it."""

_SUMS = (
    "num_responses",
    "num_prefilled",
    "num_tokens",
    "num_bytes",
    "proposed",
    "accepted",
    "tested",
    "prefill_s",
    "first_token_s",
    "draft_model_s",
    "verify_s",
    "round_s",
)


class DecodeStats:
    """Adds up rounds, of one response or of several."""

    def __init__(
        self,
        target: Vocabulary,
        *,
        target_provider: str,
        draft_provider: str | None = None,
        has_near_ties: bool = False,
    ) -> None:
        """Begin with no rounds.

        Args:
            target: Whose bytes are counted.
            target_provider: What the target ran on.
            draft_provider: What the drafter ran on; None for no drafter.
            has_near_ties: Whether the target's passes are not exact on this machine.
        """
        self._has_near_ties = has_near_ties
        self._lengths = target.lengths
        self._providers = {"draft_provider": draft_provider, "target_provider": target_provider}
        self.num_responses = 0
        self.num_prefilled = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.proposed = 0
        self.accepted = 0
        self.tested = 0
        self.prefill_s = 0.0
        self.first_token_s = 0.0
        self.draft_model_s = 0.0
        self.verify_s = 0.0
        self.round_s: list[float] = []
        self._tested_at: list[int] = []
        self._accepted_at: list[int] = []
        self._by_proposer: Counter[tuple[str, str]] = Counter()
        self._stops: Counter[Stop] = Counter()

    def follow(self, rounds: Iterable[Round], num_prefilled: int) -> Iterator[Round]:
        """Pass on the rounds of one response and count them.

        Args:
            rounds: Not started yet: what comes before the first round is timed as prefill,
                of the drafter too.
            num_prefilled: Prompt tokens that the target had to prefill.
        """
        start = time.perf_counter()
        is_first = True
        for one in rounds:
            if is_first:
                elapsed = time.perf_counter() - start
                self.num_responses += 1
                self.num_prefilled += num_prefilled
                self.first_token_s += elapsed
                self.prefill_s += max(0.0, elapsed - one.total_s)
                is_first = False
            self.record(one)
            yield one

    def record(self, one: Round) -> None:
        """Count one round."""
        verdict = one.verdict
        self.num_tokens += len(verdict.token_ids)
        self.num_bytes += int(self._lengths[list(verdict.token_ids)].sum())
        self.proposed += one.num_proposed
        self.accepted += verdict.num_accepted
        self.tested += verdict.num_tested
        self.draft_model_s += one.draft_model_s
        self.verify_s += one.verify_s
        self.round_s.append(one.total_s)
        if one.stop is not None:
            self._stops[one.stop] += 1
        for counts, number in (
            (self._tested_at, verdict.num_tested),
            (self._accepted_at, verdict.num_accepted),
        ):
            counts += [0] * (verdict.num_tested - len(counts))
            for i in range(number):
                counts[i] += 1
        if one.num_proposed:
            counts_of = {
                "rounds": 1,
                "proposed": one.num_proposed,
                "accepted": verdict.num_accepted,
            }
            self._by_proposer.update({(one.source, name): n for name, n in counts_of.items()})

    @classmethod
    def sum(cls, parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """New statistics of all rounds that `parts`, at least one, have counted."""
        first, *others = parts
        total = copy.copy(first)
        total._tested_at, total._accepted_at = list(first._tested_at), list(first._accepted_at)
        total._by_proposer = Counter(first._by_proposer)
        total._stops = Counter(first._stops)
        for other in others:
            total._add(other)
        return total

    def _add(self, other: "DecodeStats") -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in (
            (self._tested_at, other._tested_at),
            (self._accepted_at, other._accepted_at),
        ):
            mine += [0] * (len(theirs) - len(mine))
            for i, number in enumerate(theirs):
                mine[i] += number
        self._by_proposer.update(other._by_proposer)
        self._stops.update(other._stops)

    @property
    def rounds(self) -> int:
        """Rounds, each one forward pass of the target."""
        return len(self.round_s)

    @property
    def decode_s(self) -> float:
        """Time in rounds: everything but prefill."""
        return sum(self.round_s)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Conditional acceptance of the first, second, ... draft token of a round."""
        pairs = zip(self._accepted_at, self._tested_at, strict=True)
        return tuple(accepted / tested for accepted, tested in pairs)

    @property
    def tested_by_position(self) -> tuple[int, ...]:
        """How often a first, second, ... draft token of a round was tested."""
        return tuple(self._tested_at)

    @property
    def by_proposer(self) -> dict[str, dict[str, int]]:
        """Rounds with a proposal, proposed and accepted tokens of each proposer, by its name."""
        sources = sorted({source for source, _ in self._by_proposer})
        names = ("rounds", "proposed", "accepted")
        return {s: {name: self._by_proposer[s, name] for name in names} for s in sources}

    @property
    def stops(self) -> dict[Stop, int]:
        """Rounds by the reason that their drafts were not longer, see `Stop`."""
        return dict(sorted(self._stops.items()))

    @property
    def notice(self) -> str | None:
        """One line on what is not as it should be, or was off; None where there is nothing."""
        notes = []
        if off := self._stops["off"]:
            notes.append(
                f"drafting was off in {off} of {self.rounds} rounds, where it would have cost "
                "more time than it saves; it is tried again now and then"
            )
        if self._has_near_ties:
            notes.append(f"drafted text is {NEAR_TIES} on this machine")
        return "; ".join(notes) or None

    def to_json(self, *, speedup: float | None = None) -> dict[str, Any]:
        """Every metric by name; None for one that has nothing to be computed from.

        The shares of decode time are those of the drafter's forward passes, the target's
        forward passes and all the rest: bridge, verdict and bookkeeping. They sum to 1.

        Args:
            speedup: Decode tokens per second over those of the same target decoding
                plainly with the same options in the same run, where that was measured.
        """
        decode_s, rounds = self.decode_s, self.rounds
        p50, p95 = np.percentile(self.round_s, (50, 95)).tolist() if rounds else (None, None)
        other_s = decode_s - self.draft_model_s - self.verify_s
        return {
            "rounds": rounds,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance_rate": _ratio(self.accepted, self.proposed),
            "conditional_acceptance": _ratio(self.accepted, self.tested),
            "mean_acceptance_length": 1 + self.accepted / rounds if rounds else None,
            "mean_draft_length": _ratio(self.proposed, rounds),
            "bytes_per_target_forward": _ratio(self.num_bytes, rounds),
            "speedup": speedup,
            "ttft_s": _ratio(self.first_token_s, self.num_responses),
            "prefill_tokens_per_s": _ratio(self.num_prefilled, self.prefill_s),
            "decode_tokens_per_s": _ratio(self.num_tokens, decode_s),
            "draft_share": _ratio(self.draft_model_s, decode_s),
            "verify_share": _ratio(self.verify_s, decode_s),
            "bridge_share": _ratio(max(0.0, other_s), decode_s),
            "round_s_p50": p50,
            "round_s_p95": p95,
            "peak_rss_bytes": peak_rss_bytes(),
            **self._providers,
            "by_proposer": self.by_proposer,
            "stops": self.stops,
            "notice": self.notice,
        }

    def summary(self) -> str:
        """One line for people."""
        if not self.rounds:
            return "no tokens decoded"
        rate = f"{self.num_tokens} tokens, {self.num_tokens / max(self.decode_s, 1e-9):.1f} tok/s"
        where = f"target on {self._providers['target_provider']}"
        drafter = self._providers["draft_provider"]
        if drafter is None and not self.proposed:
            return f"{rate}, without drafting; {where}"
        stats = self.to_json()
        accepted = f"{self.accepted} of {self.proposed} draft tokens accepted"
        if len(by_proposer := self.by_proposer) > 1:
            accepted += "".join(
                f", {counts['accepted']} of {counts['proposed']} by {source}"
                for source, counts in by_proposer.items()
            )
        shares = ", ".join(
            f"{name} {100 * stats[f'{name}_share']:.0f} %" for name in ("draft", "verify", "bridge")
        )
        return (
            f"{rate}, {self.num_tokens / self.rounds:.2f} tokens a round ({accepted}); "
            f"time: {shares}; {f'drafter on {drafter}' if drafter else 'no drafter'}, {where}"
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
