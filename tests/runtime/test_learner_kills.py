"""kill -9 while the learner itself learns from answers: the last good version, every example."""

import contextlib
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
from background_runs import finish, keep_answers, report_of, start_run
from click.testing import CliRunner

from omnidraft_npu.cli import cli
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.files import sha256_of
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.past_recall import replay_of
from omnidraft_npu.runtime.session import Session
from omnidraft_npu.state_folder import learning, only_learner, replay_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks learners")

NUM_GIVEN = 10
"""Answers that are kept before each kill, enough to learn from."""
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


def kill_runs(bundle, home, num_kills, seed):
    """Kill `run` or the process that it started to learn, at any time, and look what is left."""
    rng = np.random.default_rng(seed)
    text = finish(*start_run(bundle, home, "--no-learn"))
    num_kept, num_begun, num_given, killed, took_s = 0, 0, 0, set(), 4.0
    while num_begun < num_kills:
        keep_answers(bundle, NUM_GIVEN)
        num_given += NUM_GIVEN
        began = time.monotonic()
        process, terminal = start_run(bundle, home)
        victim = rng.choice(["run", "learner"])
        num_begun += 1
        if victim == "run":
            time.sleep(rng.uniform(0, took_s))
            process.kill()
            said, _ = process.communicate()
            os.close(terminal)
            assert process.returncode in (0, -signal.SIGKILL)
            assert text.startswith(said.decode())
            num_kept += process.returncode == 0
        else:
            assert finish(process, terminal) == text
            took_s = time.monotonic() - began
            num_kept += 1
            time.sleep(rng.uniform(0, took_s))
            if (report := report_of(bundle)) and report["ended"] is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(report["process"], signal.SIGKILL)
                killed.add(report["process"])
        listed = CliRunner().invoke(cli, ["adapters", "list", str(bundle), "--json"])
        assert listed.exit_code == 0, listed.output
        num_examples = json.loads(listed.stdout)["replay"]["examples"] - num_given
        assert num_kept <= num_examples <= num_begun
    with only_learner_at_last(bundle), learning(bundle, "target"):
        pass
    assert not list((bundle / "state").rglob(".*.tmp"))
    assert finish(*start_run(bundle, home, "--learn-now", is_terminal=False)) == text
    pair = open_pair(bundle, threads=1)
    buffer = replay_of(pair.bundle, pair.target.entry)
    assert len(list(buffer.examples())) == len(buffer) > num_given + num_kept
    assert pair.adapter.adapter.version == pair.adapter.store.current
    return killed


@contextlib.contextmanager
def only_learner_at_last(bundle):
    """Hold its lock, after a learner that was not killed has ended."""
    with only_learner(bundle, "target", lambda: None):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_runs_and_background_learners_that_are_killed_80_times_in_all_lose_nothing(
    learning_original, tmp_path, monkeypatch, seed
):
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    bundle = shutil.copytree(learning_original, tmp_path / "bundle")
    assert kill_runs(bundle, tmp_path / "home", 20, seed), "no learner was killed at work"
