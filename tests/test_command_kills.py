"""kill -9 between any two file operations of `export --force`, `adapters` and `cache`."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from adapters_given import key_of, learn, store_of, tensors
from learned_state import LearnedState
from ngram_rows import make_entries
from tiny_bundle import write_bundle

from omnidraft_npu.bridge.ngram_file import NgramStore, PairKey, write_entries
from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.forgetting import find_learned
from omnidraft_npu.runtime.adapter_files import write_adapter
from omnidraft_npu.state_folder import learned_targets, learning, ngrams_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks processes")

CHILD = Path(__file__).with_name("killed_child.py")


class Forking:
    """A process that forks others which are killed."""

    def __init__(self, bundle):
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(bundle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, what, *arguments, call=0):
        self._process.stdin.write(json.dumps([what, list(map(str, arguments)), call]) + "\n")
        self._process.stdin.flush()

    def run(self, what, *arguments, call=0):
        """Signal and number of calls of one process."""
        self.start(what, *arguments, call=call)
        words = self._process.stdout.readline().split()
        assert words[:1] == ["end"], f"{what}: {words}"
        _, ended_by, calls = words
        return int(ended_by), int(calls)

    def lines(self):
        return self._process.stdout

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def forking(bundle):
    one = Forking(bundle)
    try:
        yield one
    finally:
        one.kill()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("made") / "bundle")


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "bundle")


def spread(calls, num_kills):
    """So many calls from the first to the last of them."""
    return [1 + round(i * (calls - 1) / max(1, num_kills - 1)) for i in range(num_kills)]


EVERY = 10_000
KILLS = [pytest.param(4, id="some"), pytest.param(EVERY, id="every", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_kills", KILLS)
def test_an_export_that_is_killed_loses_nothing(made, bundle, num_kills):
    state = LearnedState(bundle=bundle)
    with learning(bundle, "target"):
        for number in range(1, 21):
            state.append(number)
        state.store.use(state.add_version())
    with forking(bundle) as exports:
        assert exports.run("replace", made)[0] == 0
        _, calls = exports.run("replace", made)
        assert calls > 20
        seen = set()
        for call in range(1, calls + 1) if num_kills > calls else spread(calls, num_kills):
            assert exports.run("replace", made, call=call)[0] == signal.SIGKILL
            seen.add(frozenset(path.name for path in bundle.parent.iterdir()))
            open_bundle(bundle)
            assert state.numbers() == list(range(1, 21))
            assert (state.current(), len(state.store.records())) == (1, 1)
            assert not bundle.with_name("bundle.replaced").exists()
        assert num_kills < calls or frozenset({"bundle.partial", "bundle.replaced"}) in {
            frozenset(names - {".bundle.lock"}) for names in seen
        }


class Beside:
    """A learner at work, and what it acknowledged."""

    def __init__(self, process):
        self.examples, self.versions = [1], []
        self._process = process
        process.start("learn", 2)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.lines():
            what, number = line.split()
            (self.examples if what == "example" else self.versions).append(int(number))


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_an_export_that_is_killed_beside_a_learner_at_work_loses_nothing(made, bundle, num_kills):
    """6 of 400 replacements beside a writer lost what it had written, one left no bundle."""
    state = LearnedState(bundle=bundle)
    with learning(bundle, "target"):
        state.append(1)
    with forking(bundle) as exports, forking(bundle) as other:
        learner = Beside(other)
        wait_for(lambda: len(learner.examples) > 5)
        _, calls = exports.run("replace", made)
        for call in spread(calls, num_kills):
            exports.run("replace", made, call=call)
            examples, versions = list(learner.examples), list(learner.versions)
            open_bundle(bundle)
            assert set(state.numbers()) >= set(examples)
            assert {record.version for record in state.store.records()} >= set(versions)
            wait_for(lambda: len(learner.examples) > len(examples))  # noqa: B023
    assert len(learner.examples) >= num_kills


def adapters_of(bundle):
    store = store_of(bundle)
    return [record.version for record in store.records()], store.current


ADAPTER_COMMANDS = {
    "import": (("import", "more.onnx_adapter"), ([1, 2, 3, 4], 4)),
    "rollback": (("rollback", "1"), ([1, 2, 3], 1)),
}


@pytest.mark.parametrize("num_kills", KILLS)
@pytest.mark.parametrize("name", ADAPTER_COMMANDS)
def test_a_command_of_adapters_that_is_killed_is_done_or_not(bundle, tmp_path, name, num_kills):
    (subcommand, *arguments), after = ADAPTER_COMMANDS[name]
    learn(bundle)
    write_adapter(tmp_path / "more.onnx_adapter", tensors(9), key_of(bundle))
    arguments = [tmp_path / one if "." in one else one for one in arguments]
    before = ([1, 2, 3], 3)
    kept = shutil.copytree(bundle / "state", tmp_path / "kept")
    with forking(bundle) as commands:
        ended, calls = commands.run("command", "adapters", subcommand, *arguments)
        assert (ended, adapters_of(bundle)) == (0, after)
        for call in range(1, calls + 1) if num_kills > calls else spread(calls, num_kills):
            shutil.rmtree(bundle / "state")
            shutil.copytree(kept, bundle / "state")
            ended, _ = commands.run("command", "adapters", subcommand, *arguments, call=call)
            assert ended == signal.SIGKILL
            assert adapters_of(bundle) in (before, after, (after[0], before[1]))
            assert commands.run("command", "adapters", subcommand, *arguments)[0] == 0
            assert not list((bundle / "state").rglob("*.tmp"))


@pytest.mark.parametrize("num_kills", KILLS)
def test_a_forget_that_is_killed_leaves_what_can_be_used_and_forgotten(
    bundle, tmp_path, num_kills, caplog
):
    learn(bundle)
    learn(bundle, "same")
    kept = shutil.copytree(bundle / "state", tmp_path / "kept")
    with forking(bundle) as commands:
        ended, calls = commands.run("command", "adapters", "forget", "--yes")
        assert ended == 0
        assert not (bundle / "state").exists()
        for call in range(1, calls + 1) if num_kills > calls else spread(calls, num_kills):
            shutil.rmtree(bundle / "state", ignore_errors=True)
            shutil.copytree(kept, bundle / "state")
            ended, _ = commands.run("command", "adapters", "forget", "--yes", call=call)
            assert ended == signal.SIGKILL
            assert store_of(bundle).current in (0, 1, 2, 3)
            assert commands.run("command", "adapters", "forget", "--yes")[0] == 0
            assert not find_learned(bundle, learned_targets(bundle)).files
            assert not (bundle / "state").exists()


ROWS = ((30, [5, 4], 1), (31, [4, 4, 4], 2), (32, [3, 5], 7))


@pytest.mark.parametrize("num_kills", KILLS)
@pytest.mark.parametrize("arguments", [("merge", "more.safetensors"), ("prune", "--max-bytes", 25)])
def test_a_command_of_cache_that_is_killed_is_done_or_not(bundle, tmp_path, arguments, num_kills):
    manifest = open_bundle(bundle).manifest
    key = PairKey(
        drafter_sha256=manifest.drafter.tokenizer_sha256,
        target_sha256=manifest.targets["other"].tokenizer_sha256,
    )
    store = NgramStore(path=ngrams_path(bundle, "other"), key=key)
    store.save(make_entries(*ROWS))
    write_entries(tmp_path / "more.safetensors", make_entries((33, [6, 6], 4)), key)
    arguments = [tmp_path / one if one == "more.safetensors" else one for one in arguments]
    kept = shutil.copytree(bundle / "state", tmp_path / "kept")
    before = list(store.load())
    with forking(bundle) as commands:
        ended, calls = commands.run("command", "cache", *arguments)
        after = list(store.load())
        assert (ended, after != before) == (0, True)
        for call in range(1, calls + 1) if num_kills > calls else spread(calls, num_kills):
            shutil.rmtree(bundle / "state")
            shutil.copytree(kept, bundle / "state")
            assert commands.run("command", "cache", *arguments, call=call)[0] == signal.SIGKILL
            assert list(store.load()) in (before, after)
            assert commands.run("command", "cache", *arguments)[0] == 0
            assert not list((bundle / "state").rglob("*.tmp"))
