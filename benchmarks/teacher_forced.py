"""Acceptance given the target's own text before, from recorded answers; no target is run.

A drafter that has the true text before it is asked for each token of the answer. In a round
drafts follow drafts, and the context of a later one may be another: what drafting really gains
is what `omnidraft-npu bench --learn` measures. What is compared here is adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.replay import Example
from omnidraft_npu.runtime.learner_adapter import Floats
from omnidraft_npu.runtime.learner_judge import Judge

MODES = ("direct", "cache", "full")
LENGTHS = (1, 2, 4, 8)
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A recorded answer to measure with."""

    task: str
    example: Example
    token_ids: npt.NDArray[np.int32]
    """``[tokens]`` of the target."""


def measure(
    judge: Judge, lora: dict[str, Floats], held_out: Sequence[HeldOut], seen: set[int]
) -> dict[str, dict[str, Any]]:
    """By task and for `all`: acceptance greedy and sampled, and tokens a round, by draft mode.

    Args:
        judge: Of the drafter.
        lora: By graph input.
        held_out: Answers.
        seen: Target tokens of several pieces that came in the stream so far: what an n-gram
            cache can spell, besides the tokens of one piece.
    """
    examples = [one.example for one in held_out]
    sums: dict[str, list[tuple[Flags, Floats, Flags, Flags, npt.NDArray[np.int32]]]] = {}
    for one, (right, overlap) in zip(held_out, judge.outcomes(lora, examples), strict=True):
        owners = one.example.tokens[-len(overlap) :] if len(overlap) else one.example.tokens[:0]
        tokens, first, owner = np.unique(owners, return_index=True, return_inverse=True)
        is_direct = one.example.is_direct[-len(overlap) :][first]
        is_seen = is_direct | np.isin(one.token_ids[tokens], list(seen))
        for task in (one.task, "all"):
            sums.setdefault(task, []).append((right, overlap, is_direct, is_seen, owner))
    return {task: _figures(parts) for task, parts in sorted(sums.items())}


def tokens_per_round(right: Sequence[Flags], max_drafts: int) -> float:
    """Mean tokens of a round that drafts `max_drafts` tokens, were each drafted as found.

    Args:
        right: ``[tokens]`` of each answer.
        max_drafts: At least 1.
    """
    rounds = total = 0
    for flags in right:
        place = 0
        while place < len(flags):
            window = flags[place : place + max_drafts]
            accepted = len(window) if window.all() else int(window.argmin())
            place += accepted + 1
            rounds += 1
        total += len(flags)
    return total / rounds if rounds else 0.0


def _figures(
    parts: Sequence[tuple[Flags, Floats, Flags, Flags, npt.NDArray[np.int32]]],
) -> dict[str, Any]:
    found: dict[str, Any] = {"num_tokens": sum(len(right) for right, *_ in parts)}
    for mode in MODES:
        reach = [
            {"direct": is_direct, "cache": is_seen, "full": np.ones_like(is_direct)}[mode]
            for _, _, is_direct, is_seen, _ in parts
        ]
        right = [part[0] & reached for part, reached in zip(parts, reach, strict=True)]
        overlap = [part[1] * reached[part[4]] for part, reached in zip(parts, reach, strict=True)]
        found[mode] = {
            "greedy": float(np.concatenate(right).mean()),
            "sampled": float(np.concatenate(overlap).mean()),
            "tokens_per_round": {str(k): tokens_per_round(right, k) for k in LENGTHS},
        }
    return found
