"""kill -9 while an example, a version or the choice of one is written: nothing good is lost."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from learned_state import LearnedState

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks learners")

LEARNER = Path(__file__).parents[1] / "learning_child.py"
KILLS_IN_A_ROW = 20
"""On one bundle, before a new one is begun."""


class Learners:
    """Learners on one bundle, one after the other, and what they acknowledged."""

    def __init__(self, bundle: Path) -> None:
        self.state = LearnedState(bundle=bundle)
        bundle.mkdir()
        self.examples: list[int] = []
        self.versions: list[int] = []
        self.used = 0
        self._process = subprocess.Popen(
            [sys.executable, str(LEARNER), str(bundle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, how: str, amount: float) -> int:
        """One learner; what it ended with."""
        first = 1 + max(self.state.numbers(), default=0)
        self._process.stdin.write(json.dumps([how, amount, first]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            what, number = line.split()
            if what == "end":
                return int(number)
            if what == "use":
                self.used = int(number)
            else:
                (self.examples if what == "example" else self.versions).append(int(number))
        raise AssertionError("the learners' process ended")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(timeout=30) == 0

    def assert_nothing_is_lost(self, num_kills: int) -> None:
        state = self.state
        numbers = state.numbers()
        assert numbers == sorted(set(numbers)), "an example is there twice"
        assert set(numbers) >= set(self.examples)
        assert len(numbers) <= len(self.examples) + num_kills, "only the last may be unsaid"
        whole = [record.version for record in state.store.records()]
        assert set(whole) >= set(self.versions)
        current = state.current()
        newer = [version for version in whole if version > self.used]
        assert current in (self.used, *newer)
        assert len(state.leftovers()) <= 1


def kill_and_check(folder: Path, num_kills: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for start in range(0, num_kills, KILLS_IN_A_ROW):
        learners = Learners(folder / str(start))
        calls = learners.run("count", 3)
        assert calls > 60, "the calls that change files are not seen"
        for kill in range(1, min(KILLS_IN_A_ROW, num_kills - start) + 1):
            if kill % 2:
                ended = learners.run("call", int(rng.integers(1, calls + 1)))
            else:
                ended = learners.run("time", float(rng.uniform(0, 0.05)))
            assert ended == signal.SIGKILL
            learners.assert_nothing_is_lost(kill)
        learners.close()


def test_nothing_that_was_acknowledged_is_lost_to_15_kills(tmp_path, caplog):
    kill_and_check(tmp_path, 15, seed=0)
    assert not caplog.records


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost_to_200_kills(tmp_path, caplog):
    kill_and_check(tmp_path, 200, seed=1)
    assert not caplog.records
