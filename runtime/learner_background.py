"""Learning that gives way: it goes on only while nothing else is at work."""

import threading
import time
from collections.abc import Callable

from .learner import Learner
from .learner_lesson import Lesson

_POLL_S = 0.2
"""How often to look whether something is at work."""
_QUIET_S = 1.0
"""Without other work before learning goes on: the next command often follows at once."""
_GRACE_S = 10.0
"""For a pass that cannot be cancelled, at the end."""


class BackgroundLearner:
    """Gives lessons in a thread while the caller watches for other work.

    Other work never waits for a lesson: an update under way when it begins is cancelled, and
    made again when it has been quiet. A lesson that was not finished at the end is not lost,
    as the examples are kept.
    """

    def __init__(
        self, learner: Learner, is_busy: Callable[[], bool], *, quiet_s: float = _QUIET_S
    ) -> None:
        """Learn with `learner`, which belongs to this object from now on.

        Args:
            learner: Gives the lessons.
            is_busy: Whether something else is at work; called several times a second.
            quiet_s: Seconds without other work before learning goes on.
        """
        self._learner = learner
        self._is_busy = is_busy
        self._quiet_s = quiet_s
        self._may_learn = threading.Event()
        self._is_ended = False
        self._error: Exception | None = None

    def run(self, report: Callable[[Lesson], None], *, max_s: float) -> bool:
        """Give lessons until none is due, `end` is called, or the time is up.

        Args:
            report: Is given each lesson, in the learning thread.
            max_s: Seconds, in which it may also do nothing but wait.

        Returns:
            Whether the learning thread has ended; where it has not, the caller should exit.

        Raises:
            Exception: what a lesson raised.
        """
        thread = threading.Thread(target=self._learn, args=(report,), daemon=True)
        thread.start()
        now = time.monotonic()
        deadline, quiet_from = now + max_s, now
        while thread.is_alive() and not self._is_ended and now < deadline:
            if self._is_busy():
                self._may_learn.clear()
                self._learner.cancel()
                quiet_from = now + self._quiet_s
            elif now >= quiet_from:
                self._may_learn.set()
            thread.join(_POLL_S)
            now = time.monotonic()
        self._is_ended = True
        self._may_learn.set()
        while thread.is_alive() and time.monotonic() < now + _GRACE_S:
            self._learner.cancel()
            thread.join(_POLL_S)
        if self._error is not None:
            raise self._error
        return not thread.is_alive()

    def end(self) -> None:
        """Let `run` return soon; a signal handler may call this."""
        self._is_ended = True

    def _learn(self, report: Callable[[Lesson], None]) -> None:
        try:
            self._pause()
            while (lesson := self._learner.step(self._pause)) is not None:
                report(lesson)
        except _EndedError:
            return
        except Exception as error:  # noqa: BLE001 `run` raises it in the caller's thread.
            self._error = error

    def _pause(self) -> None:
        """Wait while something else is at work.

        Raises:
            _EndedError: it is time to end.
        """
        self._may_learn.wait()
        if self._is_ended:
            raise _EndedError


class _EndedError(Exception):
    """The thread is asked to end."""
