"""`omnidraft-npu run` at a terminal, as a process of its own, which may start learning."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from lessons_given import answer

from omnidraft_npu.runtime.answer_keeper import answer_keeper
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.session import Session
from omnidraft_npu.state_folder import replay_path


def keep_answers(bundle: Path, count: int) -> None:
    """Answers to learn from, as `run` keeps them."""
    session = Session(open_pair(bundle, threads=1))
    session.observer = answer_keeper(session.pair, LearnerConfig())
    for number in range(count):
        answer(session, f"number {number} and")


def start_run(bundle: Path, home: Path, *options: str, is_terminal: bool = True):
    """A started `run` whose stdout is a pipe; stderr is a terminal, or nothing."""
    command = [sys.executable, "-m", "omnidraft_npu", "run", "-b", str(bundle), "--raw"]
    command += ["--threads", "1", "--max-new-tokens", "24", *options, "the small drafter"]
    main, terminal = os.openpty() if is_terminal else (None, subprocess.DEVNULL)
    environment = os.environ | {"OMNIDRAFT_HOME": str(home)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": terminal}
    process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)
    if is_terminal:
        os.close(terminal)
    return process, main


def finish(process, main) -> str:
    """Its text, once nobody holds its stdout any more."""
    return finish_both(process, main)[0]


def finish_both(process, main) -> tuple[str, str]:
    """The same, and what it wrote to its terminal."""
    text, _ = process.communicate(timeout=60)
    shown = b""
    if main is not None:
        # Linux ends a terminal that nobody writes to any more with an error.
        with contextlib.suppress(OSError):
            while block := os.read(main, 65536):
                shown += block
        os.close(main)
    assert process.returncode == 0, shown
    return text.decode(), shown.decode()


def report_of(bundle: Path) -> dict:
    """What the learning process wrote last; empty where it wrote nothing."""
    path = replay_path(bundle, "target") / "learner.json"
    return json.loads(path.read_text()) if path.exists() else {}


def wait_for(is_true, seconds: float = 60):
    """What `is_true` gives, once that is true."""
    end = time.monotonic() + seconds
    while not (found := is_true()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found
