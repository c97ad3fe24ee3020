"""Two processes on one bundle, and a clock that nobody may rely on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from learned_state import TARGET, LearnedState

from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.state_folder import learning, replay_path

TESTS = Path(__file__).parents[1]
APPENDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from learned_state import LearnedState
state = LearnedState(bundle=Path(sys.argv[2]))
print("ready", flush=True)
first = int(sys.stdin.readline())
for number in range(first, first + 60):
    state.append(number)
"""


def start(script, bundle):
    command = [sys.executable, "-c", script, str(TESTS), str(bundle)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_that_append_lose_no_example(tmp_path):
    appenders = [start(APPENDER, tmp_path) for _ in range(2)]
    for i, appender in enumerate(appenders):
        appender.stdin.write(f"{1000 * i}\n")
        appender.stdin.flush()
    for appender in appenders:
        appender.communicate(timeout=60)
        assert appender.returncode == 0
    numbers = LearnedState(bundle=tmp_path).numbers()
    assert sorted(numbers) == [*range(60), *range(1000, 1060)]
    for begin in (0, 1000):
        own = [n for n in numbers if begin <= n < begin + 60]
        assert own == sorted(own)


def test_two_processes_that_append_and_evict_keep_the_newest(tmp_path):
    one = LearnedState(bundle=tmp_path)
    one.append(0)
    (size,) = (p.stat().st_size for p in replay_path(tmp_path, TARGET).iterdir())
    script = APPENDER.replace("state.append(number)", "buffer.append(numbered_example(number))")
    script = script.replace(
        'print("ready"',
        "from learned_state import numbered_example\n"
        "from omnidraft_npu.replay import ReplayBuffer\n"
        f"buffer = ReplayBuffer(folder=state.buffer.folder, pair='a-b', max_bytes={20 * size})\n"
        'print("ready"',
    )
    appenders = [start(script, tmp_path) for _ in range(2)]
    for i, appender in enumerate(appenders):
        appender.stdin.write(f"{1000 * (i + 1)}\n")
        appender.stdin.flush()
    for appender in appenders:
        appender.communicate(timeout=60)
        assert appender.returncode == 0
    numbers = one.numbers()
    assert 19 <= len(numbers) <= 21
    assert {1059, 2059} & set(numbers)


@pytest.mark.skipif(sys.platform != "linux", reason="forks learners")
def test_a_reader_sees_whole_versions_and_examples_while_another_learns(tmp_path, caplog):
    state = LearnedState(bundle=tmp_path)
    command = [sys.executable, str(TESTS / "learning_child.py"), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as learner:
        learner.stdin.write(json.dumps(["count", 15, 1]) + "\n")
        learner.stdin.close()
        seen, used = [], 0
        for line in learner.stdout:
            what, number = line.split()
            used = int(number) if what == "use" else used
            seen.append(state.current())
            assert seen[-1] >= used
            numbers = state.numbers()
            assert numbers == list(range(1, len(numbers) + 1))
    assert seen == sorted(seen)
    assert (used, seen[-1]) == (15, 15)
    assert not caplog.records


def test_nothing_depends_on_the_clock(tmp_path, monkeypatch):
    """It goes back by a year with every look at it, and the files' own times do as well."""
    state = LearnedState(bundle=tmp_path)
    now = [4e9]

    def back():
        now[0] -= 3e7
        return now[0]

    monkeypatch.setattr(time, "time", back)
    for number in range(1, 6):
        with learning(tmp_path, TARGET):
            state.append(number)
            state.store.use(state.add_version())
        for path in tmp_path.rglob("*"):
            os.utime(path, (back(), back()))
    assert state.numbers() == [1, 2, 3, 4, 5]
    assert state.current() == 5
    size = max(p.stat().st_size for p in replay_path(tmp_path, TARGET).iterdir())
    small = ReplayBuffer(folder=state.buffer.folder, pair="a-b", max_bytes=2 * size)
    small.append(next(iter(state.buffer.examples())))
    assert state.numbers() == [5, 1]
