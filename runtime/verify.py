"""Does drafting leave the target's text alone? Speculative against plain, on the user's prompts."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from omnidraft_npu.config import DecodeConfig

from .observed_lm import ObservedLM
from .opened_pair import OpenedPair
from .session import Delta, Session

Tell = Callable[[int, int], None]
"""Called with what is done and its total."""
Outcome = Literal["equal", "near-tie", "bug"]

DEFAULT_TIE_TOLERANCE = 0.01
"""Part of a row's logit range that rounding may close; quantised activations reach about this."""
_SAME = 1e-6
"""Part of a row's logit range within which two rows are taken for the same."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a drafted response first leaves the plain one."""

    draft_tokens: int
    """The k that it was decoded with."""
    position: int
    """Response tokens before it."""
    plain_token: int | None
    """What the target alone chose; None where its response had ended."""
    drafted_token: int | None
    logit_gap: float | None
    """How much higher the plain token stood in the plain run's row; None where one had ended."""
    logit_range: float | None
    """Highest less lowest logit of that row."""
    is_near_tie: bool


@dataclass(frozen=True, kw_only=True)
class PromptCheck:
    """What became of one prompt."""

    index: int
    num_tokens: int
    """Length of the plain response."""
    differences: tuple[Difference, ...]
    """At most one for each draft length."""
    num_broken: int
    """Rows of logits that held NaN or infinity."""

    @property
    def outcome(self) -> Outcome:
        """Equal; parted at near-ties only; or wrong."""
        if self.num_broken or any(not d.is_near_tie for d in self.differences):
            return "bug"
        return "near-tie" if self.differences else "equal"


def check_greedy(
    pair: OpenedPair,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    draft_lengths: Sequence[int],
    *,
    tie_tolerance: float = DEFAULT_TIE_TOLERANCE,
    report: Tell = lambda done, total: None,
) -> Iterator[PromptCheck]:
    """Decode every prompt with each draft length and plainly, and compare token for token.

    Drafted responses come from one conversation that moves from prompt to prompt, as a
    program would use it; each plain response comes from a fresh one without a drafter.

    Args:
        pair: A target and its drafter.
        prompts: Target ids of each.
        config: Limits; its `max_draft_tokens` is not used.
        draft_lengths: Every k to try.
        tie_tolerance: A gap up to this part of the row's logit range is a near-tie, which
            another order of summation can flip; a larger one is a bug.
        report: Told of the tokens decoded and the most that can be; those that a response which
            ends early leaves out count as decoded.

    Yields:
        One check a prompt, in order.
    """
    target = ObservedLM(pair.target.graph.begin())
    session = Session(pair, target=target)
    responses = len(draft_lengths) + 1
    progress = _Progress(report, config.max_new_tokens, responses * len(prompts))
    for index, prompt in enumerate(prompts):
        target.num_broken = 0
        drafted = {}
        for k in draft_lengths:
            settings = dataclasses.replace(config, max_draft_tokens=k)
            deltas = progress.over(session.generate(prompt, settings))
            drafted[k] = [token for delta in deltas for token in delta.token_ids]
        check = _compare(pair, prompt, config, drafted, tie_tolerance, progress)
        yield dataclasses.replace(
            check, index=index, num_broken=check.num_broken + target.num_broken
        )


class _Progress:
    """How far many responses of at most so many tokens are."""

    def __init__(self, report: Tell, max_new_tokens: int, num_responses: int) -> None:
        self._report = report
        self._each, self._total = max_new_tokens, max_new_tokens * num_responses
        self._finished = 0
        report(0, self._total)

    def over(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """The deltas of the next response."""
        done = self._finished
        for delta in deltas:
            yield delta
            done += len(delta.token_ids)
            self._report(done, self._total)
        self._finished += self._each
        self._report(self._finished, self._total)


def _compare(
    pair: OpenedPair,
    prompt: Sequence[int],
    config: DecodeConfig,
    drafted: dict[int, list[int]],
    tie_tolerance: float,
    progress: _Progress,
) -> PromptCheck:
    """Decode plainly and look at the logits where a drafted response has another token."""
    target = ObservedLM(pair.target.graph.begin())
    alone = dataclasses.replace(pair, drafter=None, proposer=None)
    plain = Session(alone, target=target)
    open_runs = dict(drafted)
    found: list[Difference] = []
    position = 0
    for delta in progress.over(plain.generate(prompt, config)):
        (token,) = delta.token_ids
        for k, tokens in list(open_runs.items()):
            other = tokens[position] if position < len(tokens) else None
            if other != token:
                row = target.logits[-1]
                found.append(_difference(k, position, token, other, row, tie_tolerance))
                del open_runs[k]
        position += 1
    for k, tokens in open_runs.items():
        if len(tokens) > position:
            found.append(_difference(k, position, None, tokens[position], None, tie_tolerance))
    return PromptCheck(
        index=0, num_tokens=position, differences=tuple(found), num_broken=target.num_broken
    )


def _difference(
    draft_tokens: int,
    position: int,
    plain: int | None,
    drafted: int | None,
    row: npt.NDArray[np.float32] | None,
    tie_tolerance: float,
) -> Difference:
    gap = spread = None
    if row is not None and plain is not None and drafted is not None:
        gap = float(row[plain]) - float(row[drafted])
        spread = float(np.ptp(row[np.isfinite(row)]))
    return Difference(
        draft_tokens=draft_tokens,
        position=position,
        plain_token=plain,
        drafted_token=drafted,
        logit_gap=gap,
        logit_range=spread,
        is_near_tie=gap is not None and spread is not None and 0 <= gap <= tie_tolerance * spread,
    )


def find_blindness(
    pair: OpenedPair,
    prompts: Sequence[Sequence[int]],
    report: Tell = lambda done, total: None,
) -> str | None:
    """What of its prompt the target does not see, in words; None where it sees all.

    Such a target still decodes the same with and without a drafter. Two contexts that end
    differently must give different logits, and so must two that differ only earlier.

    Args:
        pair: The target is looked at.
        prompts: Target ids; the first one is varied.
        report: Told of the contexts looked at and their total.
    """
    first = list(prompts[0])
    last = first[-1]
    others = [token for prompt in prompts for token in prompt if token != last]
    other = others[-1] if others else (last + 1) % pair.target.graph.vocab_size
    target = ObservedLM(pair.target.graph.begin())
    contexts = (first, [*first, other], [*first, other, last])
    rows = []
    for done, ids in enumerate(contexts):
        report(done, len(contexts))
        rows.append(_row_after(target, ids))
    report(len(contexts), len(contexts))
    if _is_same(rows[0], rows[1]) and _is_same(rows[0], rows[2]):
        return "the target gives the same logits whatever the prompt"
    if _is_same(rows[0], rows[2]):
        return "the target's logits depend on the last token only, not on what came before it"
    return None


def _row_after(target: ObservedLM, token_ids: list[int]) -> npt.NDArray[np.float32]:
    target.reset()
    token_ids = token_ids[-target.context_length :]
    target.prefill(token_ids[:-1])
    row: npt.NDArray[np.float32] = target.score(token_ids[-1:])[0].copy()
    return row


def _is_same(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    return bool(np.all(np.abs(one - other) <= _SAME * np.ptp(one)))
