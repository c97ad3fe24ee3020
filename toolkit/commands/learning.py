"""What commands share that learn from the answers they write."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import OmniDraftError, StateError
from ..printing import echo

if TYPE_CHECKING:
    from omnidraft_npu.runtime.learner import Learner
    from omnidraft_npu.runtime.session import Session

_TOLD_AFTER_S = 1.0
"""A lesson that takes longer says that it is under way."""


@contextlib.contextmanager
def learning_session(session: "Session", *, threads: int | None) -> Iterator["Learner | None"]:
    """Let a session's answers be learned from, for the block.

    Nothing where the bundle cannot learn; where it may not now, one line on stderr says why.
    """
    from omnidraft_npu.runtime.learner_config import LearnerConfig
    from omnidraft_npu.runtime.learner_opening import can_learn, open_learner

    with contextlib.ExitStack() as ending:
        learner = None
        if can_learn(session.pair):
            try:
                learner = ending.enter_context(
                    open_learner(session.pair, LearnerConfig(), threads=threads)
                )
            except StateError as error:
                echo(f"this answer is not learned from: {error}", err=True)
        session.observer = learner
        ending.callback(setattr, session, "observer", None)
        yield learner


def give_lesson(learner: "Learner") -> None:
    """Learn now if it is time, and say what came of it, or why not; Ctrl-C breaks it off."""
    started, is_told = time.perf_counter(), False

    def tell() -> None:
        nonlocal is_told
        if not is_told and time.perf_counter() - started > _TOLD_AFTER_S:
            is_told = True
            echo(f"learning from the last {learner.num_new} answers; Ctrl-C puts it off", err=True)

    try:
        lesson = learner.step(tell)
    except KeyboardInterrupt:
        echo("learning is put off: the answers are kept for the next time", err=True)
        return
    except OmniDraftError as error:
        echo(f"nothing was learned from the answers, they are kept: {error}", err=True)
        return
    if lesson is not None:
        echo(str(lesson), err=True)
