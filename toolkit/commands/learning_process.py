"""Learning in a process of its own, which outlives the command that started it."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..activity import is_anyone_at_work
from ..bundle import open_bundle
from ..errors import StateError
from ..store.local import store_folder
from .decoding_options import device_options

if TYPE_CHECKING:
    from omnidraft_npu.runtime.learner_report import LearnerReport

    from ..config import DeviceConfig

MAX_S = 1800.0
"""Seconds that the process lives at most; the next command starts another."""


def start_process(
    bundle: Path, target: str, *, threads: int | None, devices: "DeviceConfig"
) -> None:
    """Learn from the kept answers of a target in the background.

    The process has no terminal and no pipe of ours, so nobody waits for its end. It does not
    run in the current folder, and imports nothing from there (-P).

    Raises:
        OSError: it cannot be started.
    """
    options = [f"--bundle={bundle.resolve()}", f"--target={target}"]
    options += [f"--draft-device={devices.draft_device}"]
    options += [f"--threads={threads}"] if threads is not None else []
    options += ["--simulate"] if devices.simulate else []
    options += [f"--soc={devices.soc}"] if devices.soc is not None else []
    subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=sys.prefix,
        env=os.environ | {"OMNIDRAFT_HOME": str(store_folder().resolve())},
        start_new_session=True,  # of POSIX; the flags are of Windows
        creationflags=_windows_flags(),
    )


def _windows_flags() -> int:
    if sys.platform != "win32":
        return 0
    return (
        subprocess.DETACHED_PROCESS
        | subprocess.CREATE_NEW_PROCESS_GROUP
        | subprocess.IDLE_PRIORITY_CLASS
    )


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), required=True)
@click.option("--target", required=True)
@click.option("--threads", type=int)
@device_options
def command(bundle: Path, target: str, threads: int | None, devices: "DeviceConfig") -> None:
    """Learn until nothing is left to learn from, giving way to commands; see `start_process`."""
    from omnidraft_npu.runtime.learner_background import BackgroundLearner
    from omnidraft_npu.runtime.learner_config import LearnerConfig
    from omnidraft_npu.runtime.learner_lesson import Lesson
    from omnidraft_npu.runtime.learner_opening import open_learner_alone
    from omnidraft_npu.runtime.learner_report import LearnerReport, report_path
    from omnidraft_npu.runtime.past_recall import replay_of

    if sys.platform != "win32":
        os.nice(19)
    opened = open_bundle(bundle)
    entry = opened.target(target)
    report = LearnerReport.begin(replay_of(opened, entry).newest)
    logging.getLogger("omnidraft_npu").addHandler(_Noted(report))

    def write() -> None:
        if report_path(opened, entry).exists():  # What was forgotten does not come back.
            report.write(opened, entry)

    def add(lesson: Lesson) -> None:
        report.updates.append(str(lesson))
        write()

    try:
        with open_learner_alone(
            opened, entry, LearnerConfig(), threads=threads, devices=devices
        ) as learner:
            background = BackgroundLearner(learner, is_anyone_at_work)
            signal.signal(signal.SIGTERM, lambda *_: background.end())
            report.write(opened, entry)
            try:
                has_ended = background.run(add, max_s=MAX_S)
                report.end()
            except Exception as error:
                report.end(error)
                raise
            finally:
                write()
            if not has_ended:
                os._exit(1)
    except StateError:
        sys.exit(StateError.exit_code)


class _Noted(logging.Handler):
    """Adds warnings to a report: nobody reads the output of this process."""

    def __init__(self, report: "LearnerReport") -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.warn(record.getMessage())


if __name__ == "__main__":
    command()
