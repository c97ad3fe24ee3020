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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Found:
    """What one answer's tokens would have come to."""

    right: Flags
    """``[tokens]`` whether the drafter's likeliest pieces spell it."""
    overlap: Floats
    """``[pieces]`` of the laws."""
    owners: npt.NDArray[Any]
    """``[pieces]`` row of the token that each is of."""
    reach: dict[str, Flags]
    """``[tokens]`` by draft mode, whether it could be drafted at all."""


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
    by_task: dict[str, list[_Found]] = {}
    examples = [one.example for one in held_out]
    for one, (right, overlap) in zip(held_out, judge.outcomes(lora, examples), strict=True):
        if not len(right):
            continue
        example = one.example
        tokens, first, owners = np.unique(
            example.tokens[-len(overlap) :], return_index=True, return_inverse=True
        )
        is_direct = example.is_direct[-len(overlap) :][first]
        found = _Found(
            right=right,
            overlap=overlap,
            owners=owners,
            reach={
                "direct": is_direct,
                "cache": is_direct | np.isin(one.token_ids[tokens], list(seen)),
                "full": np.ones_like(is_direct),
            },
        )
        for task in (one.task, "all"):
            by_task.setdefault(task, []).append(found)
    return {task: _figures(parts) for task, parts in sorted(by_task.items())}


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


def _figures(parts: Sequence[_Found]) -> dict[str, Any]:
    figures: dict[str, Any] = {"num_tokens": sum(len(one.right) for one in parts)}
    for mode in MODES:
        right = [one.right & one.reach[mode] for one in parts]
        overlap = [one.overlap * one.reach[mode][one.owners] for one in parts]
        figures[mode] = {
            "greedy": float(np.concatenate(right).mean()),
            "sampled": float(np.concatenate(overlap).mean()),
            "tokens_per_round": {str(k): tokens_per_round(right, k) for k in LENGTHS},
        }
    return figures
