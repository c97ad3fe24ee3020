"""What came of learning from some answers."""

import math
from dataclasses import dataclass
from typing import Literal

from .learner_judge import Acceptance

Outcome = Literal["kept", "continued", "rolled back", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One lesson, after it was judged."""

    outcome: Outcome
    """`kept`: a new version, in use from the next request on. `continued`: not yet better, so
    training goes on and nothing new is in use. `rolled back`: worse, training begins anew from
    the version in use. `skipped`: the loss was no number or exploded, likewise."""
    version: int
    """In use from now on."""
    num_examples: int
    """New answers learned from."""
    num_updates: int
    """Steps of the optimiser."""
    loss: float
    """Mean over the updates."""
    before: Acceptance | None
    """Of the version in use before, on held-back answers; None where there are none yet."""
    after: Acceptance | None
    """Of what was learned; None also where that was skipped."""
    seconds: float

    def __str__(self) -> str:
        text = f"learned from {self.num_examples} answers in {self.seconds:.1f} s: {self.outcome}"
        if self.outcome == "skipped":
            return f"{text}, its loss is {self.loss:.3g}"
        if self.before is None or self.after is None:
            return f"{text}, no answer was held back yet to judge it by"
        figures = f"held-back acceptance {self.before.mean:.3f} -> {self.after.mean:.3f}"
        return f"{text}, {figures}" + (f", v{self.version:04}" if self.outcome == "kept" else "")


def judged(before: Acceptance | None, after: Acceptance | None, min_judged: int) -> Outcome:
    """Whether an adapter is kept: it must draft better than the one in use, and nowhere worse.

    One that drafts hardly worse, as may come of chance, is trained on.

    Args:
        before: Of the version in use.
        after: Of the adapter, on the same answers.
        min_judged: Tokens without which there is no judgement.
    """
    if before is None or after is None or after.num_tokens < min_judged:
        return "continued"
    if not math.isfinite(after.mean):
        return "skipped"
    is_worse = after.greedy < before.greedy or after.sampled < before.sampled
    if after.mean > before.mean and not is_worse:
        return "kept"
    return "rolled back" if after.mean < before.mean - after.chance else "continued"
