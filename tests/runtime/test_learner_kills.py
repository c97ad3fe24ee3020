"""kill -9 while the learner itself learns from answers: the last good version, every example."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.files import sha256_of
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.past_recall import replay_of
from omnidraft_npu.runtime.session import Session
from omnidraft_npu.state_folder import learning, replay_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks learners")

CHILD = Path(__file__).parents[1] / "learning_child.py"


def text_of(bundle):
    """An answer with the adapter in use, and its version."""
    pair = open_pair(bundle, threads=1, proposer="model")
    session = Session(pair)
    prompt = session.encode("the drafter", raw=True)
    deltas = session.generate(prompt, DecodeConfig(max_new_tokens=24))
    return [i for delta in deltas for i in delta.token_ids], pair.adapter


class Said:
    """What the learners acknowledged, over all of them."""

    def __init__(self) -> None:
        self.num_examples = self.newest = self.used = 0

    def take(self, line):
        what, number = line.split()
        if what == "example":
            self.num_examples += 1
            self.newest = int(number)
        elif what == "use":
            self.used = int(number)
        else:
            assert (what, int(number)) == ("end", signal.SIGKILL)
        return what


def kill_one(forking, said, rng):
    """Start a learner, and kill it at any time after some examples: often within a lesson."""
    forking.stdin.write(json.dumps(["answers", 0, said.newest + 1]) + "\n")
    forking.stdin.flush()
    what, process = forking.stdout.readline().split()
    assert what == "process"
    waits_s = 0.02
    for _ in range(rng.integers(0, 8)):
        began = time.monotonic()
        said.take(forking.stdout.readline())
        waits_s = max(waits_s, time.monotonic() - began)
    time.sleep(rng.uniform(0, waits_s))
    os.kill(int(process), signal.SIGKILL)
    while said.take(forking.stdout.readline()) != "end":
        pass


def kill_learners(bundle, num_kills, seed):
    """Kill learners one after the other, and look after each what is there."""
    rng = np.random.default_rng(seed)
    exported = {p: sha256_of(p) for p in bundle.rglob("*") if p.is_file()}
    text, _ = text_of(bundle)
    command = [sys.executable, str(CHILD), str(bundle)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    said = Said()
    with subprocess.Popen(command, **pipes) as forking:
        for kill in range(1, num_kills + 1):
            kill_one(forking, said, rng)
            again, adapter = text_of(bundle)
            assert again == text
            assert adapter.adapter.version == adapter.store.current >= said.used
            with learning(bundle, "target"):
                pass
            assert not list((bundle / "state").rglob(".*.tmp"))
            kept = list(replay_path(bundle, "target").glob("0*.safetensors"))
            assert said.num_examples <= len(kept) <= said.num_examples + kill
        forking.stdin.close()
    assert {p: sha256_of(p) for p in exported} == exported
    pair = open_pair(bundle, threads=1)
    buffer = replay_of(pair.bundle, pair.target.entry)
    assert len(list(buffer.examples())) == len(buffer) >= said.num_examples > 0
    return said


def test_a_learner_that_is_killed_4_times_loses_nothing(learning_original, tmp_path, caplog):
    bundle = shutil.copytree(learning_original, tmp_path / "bundle")
    kill_learners(bundle, 4, seed=0)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_learner_that_is_killed_200_times_in_all_loses_nothing(
    learning_original, tmp_path, caplog, seed
):
    bundle = shutil.copytree(learning_original, tmp_path / "bundle")
    said = kill_learners(bundle, 20, seed=seed)
    assert said.used > 0, "no lesson was kept between the kills"
    assert not caplog.records
