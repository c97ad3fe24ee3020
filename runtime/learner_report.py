"""What learning in the background did last, for `adapters list`: a file beside the examples."""

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from omnidraft_npu.bundle import Bundle
from omnidraft_npu.documents import Count, read_document
from omnidraft_npu.errors import BundleError, BusyError
from omnidraft_npu.files import private_folder, write_json
from omnidraft_npu.manifest import ModelEntry
from omnidraft_npu.replay import LEARNER_FILE
from omnidraft_npu.state_folder import only_learner, replay_path

logger = logging.getLogger(__name__)

FORMAT_VERSION: Literal[1] = 1
_MAX_CHARACTERS = 500
"""Of an error or warning that is kept."""


@dataclass(kw_only=True)
class LearnerReport:
    """One process that learned."""

    format_version: Literal[1] = FORMAT_VERSION
    started: str
    """UTC, ISO 8601, as is `ended`."""
    process: Count
    newest: Count = 0
    """Number of the newest example when it began."""
    ended: str | None = None
    """None while it is at work, or where it was killed."""
    updates: list[str] = field(default_factory=list)
    """One line each."""
    warnings: list[str] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def begin(cls, newest: int) -> "LearnerReport":
        """Of this process, from now on; `newest` is the number of the newest example."""
        return cls(started=_now(), process=os.getpid(), newest=newest)

    def end(self, error: BaseException | None = None) -> None:
        """Note that it has ended, and why if that was an error."""
        self.ended = _now()
        if error is not None:
            self.error = _one_line(str(error)) or type(error).__name__

    def warn(self, message: str) -> None:
        """Note something that went wrong, once."""
        if (line := _one_line(message)) not in self.warnings:
            self.warnings.append(line)

    def write(self, bundle: Bundle, target: ModelEntry) -> None:
        """Keep it, atomically.

        Raises:
            OSError: it cannot be written.
        """
        path = report_path(bundle, target)
        private_folder(path.parent)
        write_json(path, dataclasses.asdict(self), private=True)


def report_path(bundle: Bundle, target: ModelEntry) -> Path:
    """Where the report of a target lies."""
    return replay_path(bundle.state_root, target.name) / LEARNER_FILE


def read_report(bundle: Bundle, target: ModelEntry) -> LearnerReport | None:
    """What learning did last; None where it never did anything, or the file is damaged."""
    path = report_path(bundle, target)
    if not path.exists():
        return None
    try:
        return read_document(path, LearnerReport, advice="delete it", is_closed=True)
    except BundleError as error:
        logger.warning("what learning did last is unknown: %s", error)
        return None


def is_learning(bundle: Bundle, target: ModelEntry) -> bool:
    """Whether a process that reports is learning now; one that was killed is not."""
    report = read_report(bundle, target)
    if report is None or report.ended is not None:
        return False
    try:
        with only_learner(bundle.state_root, target.name):
            return False
    except BusyError:
        return True


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_CHARACTERS]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
