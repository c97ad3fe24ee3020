"""What `run` does with its answers: keep them, and learn from them now or in the background."""

import sys
from typing import TYPE_CHECKING

from ..activity import at_work
from ..errors import OmniDraftError
from ..printing import echo
from .learning_process import start_process
from .progress import stage_progress

if TYPE_CHECKING:
    from omnidraft_npu.runtime.opened_pair import OpenedPair
    from omnidraft_npu.runtime.session import Session

    from ..config import DeviceConfig


def keep_answers(session: "Session") -> bool:
    """Let a session's answers be kept to learn from; whether the bundle can learn."""
    from omnidraft_npu.runtime.answer_keeper import answer_keeper, can_learn
    from omnidraft_npu.runtime.learner_config import LearnerConfig

    if not can_learn(session.pair):
        return False
    session.observer = answer_keeper(session.pair, LearnerConfig())
    return True


def learn_later(pair: "OpenedPair", *, threads: int | None, devices: "DeviceConfig") -> None:
    """Start learning in the background if it is time and somebody works at a terminal.

    A script's commands start nothing: their answers are learned from by the next command that
    has a terminal.
    """
    from omnidraft_npu.runtime.learner_config import LearnerConfig
    from omnidraft_npu.runtime.learner_opening import num_to_learn_from
    from omnidraft_npu.runtime.learner_report import is_learning

    bundle, target = pair.bundle, pair.target.entry
    assert bundle is not None, "only models of a bundle can learn"
    # A stream that the caller closed is None.
    if not any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)):
        return
    num_new = num_to_learn_from(bundle, target, LearnerConfig())
    if num_new < LearnerConfig().batch or is_learning(bundle, target):
        return
    try:
        start_process(bundle.root, target.name, threads=threads, devices=devices)
    except OSError as error:
        echo(f"learning cannot be started in the background: {error.strerror}", err=True)
        return
    echo(f"learning from {num_new} answers in the background", err=True)


def learn_now(pair: "OpenedPair", *, threads: int | None) -> None:
    """Learn from all kept answers, with a progress bar; Ctrl-C puts it off."""
    from omnidraft_npu.runtime.learner_config import LearnerConfig
    from omnidraft_npu.runtime.learner_opening import open_learner

    def busy() -> None:
        echo("another process is learning for this target: waiting for it", err=True)

    num_updates = 0
    try:
        with (
            open_learner(pair, LearnerConfig(), threads=threads, busy=busy) as learner,
            at_work(),
        ):
            while learner.is_due:
                with stage_progress() as report:
                    lesson = learner.step(report=report)
                if lesson is None:
                    return
                num_updates += 1
                echo(str(lesson), err=True)
            if not num_updates:
                echo(
                    f"nothing to learn yet: {learner.num_new} of the {learner.config.batch} "
                    "answers that an update takes are kept",
                    err=True,
                )
    except KeyboardInterrupt:
        echo("learning is put off: the answers are kept for the next time", err=True)
    except OmniDraftError as error:
        echo(f"nothing was learned from the answers, they are kept: {error}", err=True)
