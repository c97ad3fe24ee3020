"""Decide a proposal: which drafts are kept, and the target token that follows them."""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .proposal import Proposal


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one round: the accepted drafts and one token of the target's own."""

    token_ids: tuple[int, ...]
    """Accepted draft tokens, then the correction or bonus unless a stop token cut it off."""
    num_accepted: int
    num_tested: int
    """Draft tokens compared with the target: the accepted ones and a rejected one."""
    is_stopped: bool = False

    def until(self, stop_token_ids: Set[int]) -> "Verdict":
        """The same verdict cut after its first stop token, if it has one."""
        for i, token_id in enumerate(self.token_ids):
            if token_id in stop_token_ids:
                return Verdict(
                    token_ids=self.token_ids[: i + 1],
                    num_accepted=min(self.num_accepted, i + 1),
                    num_tested=min(self.num_tested, i + 1),
                    is_stopped=True,
                )
        return self


def verify(proposal: Proposal, logits: npt.NDArray[np.float32]) -> Verdict:
    """Keep the drafts that are the target's greedy choice and add one greedy token.

    Args:
        proposal: k draft tokens.
        logits: ``[k + 1, vocab]`` of the target, row i before draft token i.

    Returns:
        A verdict of ``num_accepted + 1`` tokens; ties go to the lowest id.

    Raises:
        ValueError: the number of rows is not k + 1.
    """
    k = len(proposal.token_ids)
    if len(logits) != k + 1:
        raise ValueError(f"{k} drafts need {k + 1} rows of logits, got {len(logits)}")
    emitted: list[int] = []
    for i in range(k + 1):
        choice = int(np.argmax(logits[i]))
        emitted.append(choice)
        if i < k and choice != proposal.token_ids[i]:
            return Verdict(token_ids=tuple(emitted), num_accepted=i, num_tested=i + 1)
    return Verdict(token_ids=tuple(emitted), num_accepted=k, num_tested=k)
