"""What came of learning from some answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .learner_changes import Changes, changes
from .learner_config import LearnerConfig
from .learner_judge import Acceptance, Drafted

Outcome = Literal["kept", "continued", "rolled back", "withdrawn", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One lesson, after it was judged."""

    outcome: Outcome
    """`kept`: a new version, in use from the next request on. `continued`: not yet better, so
    training goes on and nothing new is in use. `rolled back`: worse, training begins anew from
    the version in use. `withdrawn`: so, and the version in use is worse than none, so there is
    none from the next request on. `skipped`: the loss was no number or exploded."""
    version: int
    """In use from now on."""
    num_examples: int
    """New answers learned from."""
    num_updates: int
    """Steps of the optimiser."""
    loss: float
    """Mean over the updates."""
    base: Acceptance | None
    """Of the drafter without an adapter, on held-back answers; None where there are none yet."""
    before: Acceptance | None
    """Of the version in use before, on the same."""
    after: Acceptance | None
    """Of what was learned; None also where that was skipped."""
    seconds: float

    def __str__(self) -> str:
        text = f"learned from {self.num_examples} answers in {self.seconds:.1f} s: {self.outcome}"
        if self.outcome == "skipped":
            return f"{text}, its loss is {self.loss:.3g}"
        if self.base is None or self.before is None or self.after is None:
            return f"{text}, no answer was held back yet to judge it by"
        text += f", held-back acceptance {self.before.mean:.3f} -> {self.after.mean:.3f}"
        text += f" over {self.after.num_tokens} tokens"
        if self.before != self.base:
            text += f" (without an adapter {self.base.mean:.3f})"
        if self.outcome == "withdrawn":
            return f"{text}; the drafter is used without an adapter again"
        if self.outcome == "continued":
            return f"{text}; not surely better yet, so training goes on"
        return f"{text}, v{self.version:04}" if self.outcome == "kept" else text


def judged(
    base: Sequence[Drafted],
    before: Sequence[Drafted],
    after: Sequence[Drafted],
    config: LearnerConfig,
) -> Outcome:
    """Whether an adapter is kept: better than the one in use, worse nowhere, nor than none at all.

    Better and worse are what chance among responses does not explain. Two adapters are compared
    response by response, as those differ far more from each other than adapters do. To be so on
    the latest responses is enough if all together do not surely speak against it: after a change
    of what is asked those before would hide it.

    Args:
        base: What the drafter without an adapter would have drafted of held-back responses, the
            oldest first.
        before: What the version in use would have.
        after: What the adapter would have, of the same responses.
        config: Tokens without which there is no judgement, and how many are the latest.
    """
    found = Acceptance.of(after)
    if found is None or found.num_tokens < config.min_judged:
        return "continued"
    if not math.isfinite(found.mean):
        return "skipped"
    steps = [changes(reference, after) for reference in (before, base)]
    if _are_gains(steps):
        return "kept"
    num_latest = config.num_latest
    latest = after[-num_latest:]
    if sum(len(right) for right, _ in latest) >= config.min_judged:
        recent = [changes(reference[-num_latest:], latest) for reference in (before, base)]
        if _are_gains(recent) and not any(step.is_worse for step in steps):
            return "kept"
    if changes(base, before).mean.is_worse:
        return "withdrawn"
    return "rolled back" if any(step.mean.is_worse for step in steps) else "continued"


def _are_gains(steps: Sequence[Changes]) -> bool:
    """Whether a lesson gained over the version in use, the first, and lost against none."""
    return steps[0].mean.is_better and not any(step.is_loss for step in steps)
