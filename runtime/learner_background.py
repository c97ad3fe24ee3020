"""Learning in a thread of its own, while nothing is decoded."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from omnidraft_npu.errors import OmniDraftError

from .learner import Learner
from .learner_lesson import Lesson
from .learner_recorder import Answer

logger = logging.getLogger(__name__)

_QUIET_S = 0.25
"""Without decoding before learning goes on: the next request often follows at once."""


class BackgroundLearner:
    """Gives lessons whenever they are due and nothing is decoded; leave its block to end it.

    Decoding never waits: an update under way when it begins is called off, and done anew
    when it has been quiet again. What was not finished at the end is not lost, the examples
    are kept.
    """

    def __init__(
        self,
        learner: Learner,
        report: Callable[[Lesson], None] | None = None,
        *,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """Learn with `learner`, which belongs to this object from now on.

        Args:
            learner: Gives the lessons.
            report: Told of each, in the learning thread; None logs them.
            quiet_s: Seconds without decoding before learning goes on.
        """
        self._learner = learner
        self._report = report or (lambda lesson: logger.info("%s", lesson))
        self._quiet_s = quiet_s
        self._changed = threading.Condition()
        self._num_decoding = 0
        self._quiet_from = time.monotonic()
        self._has_news = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    def __enter__(self) -> "BackgroundLearner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._learner.cancel()
        self._thread.join()

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Holds while something is decoded; nothing is learned meanwhile."""
        with self._changed:
            self._num_decoding += 1
        self._learner.cancel()
        try:
            yield
        finally:
            with self._changed:
                self._num_decoding -= 1
                self._quiet_from = time.monotonic()
                self._changed.notify_all()

    def observe(self, answer: Answer) -> bool:
        """Keep an answer, to be learned from later; whether it was kept."""
        is_kept = self._learner.observe(answer)
        with self._changed:
            self._has_news |= is_kept
            self._changed.notify_all()
        return is_kept

    def _run(self) -> None:
        with contextlib.suppress(_ClosedError):
            while True:
                self._wait_for_news()
                try:
                    while (lesson := self._learner.step(self._pause)) is not None:
                        self._report(lesson)
                except OmniDraftError as error:
                    logger.warning("learning has ended: %s", error)
                    return

    def _wait_for_news(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or self._is_closed)
            self._has_news = False
        self._pause()

    def _pause(self) -> None:
        """Wait until it is quiet.

        Raises:
            _ClosedError: it is time to end.
        """
        with self._changed:
            while not self._is_closed:
                if self._num_decoding:
                    self._changed.wait()
                    continue
                left = self._quiet_from + self._quiet_s - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)
        raise _ClosedError


class _ClosedError(Exception):
    """The thread is asked to end."""
