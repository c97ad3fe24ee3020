"""A disk that is full, or cannot be written: an error, and everything good as it was."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from failing_writes import FailingWrites
from learned_state import TARGET, LearnedState
from ngram_rows import make_entries

from omnidraft_npu.bridge.ngram_file import NgramStore, PairKey
from omnidraft_npu.errors import StateError
from omnidraft_npu.state_folder import learning, ngrams_path

ROW = (7, [1, 2, 3], 1)


def ngrams_of(state):
    key = PairKey(drafter_sha256="d", target_sha256="t")
    return NgramStore(path=ngrams_path(state.bundle, TARGET), key=key)


def learn(state, number):
    """An example, a version, the choice of it, and a learned spelling."""
    with learning(state.bundle, TARGET):
        state.append(number)
        state.store.use(state.add_version())
        ngrams_of(state).save(make_entries(ROW))


@pytest.fixture
def learned(tmp_path):
    state = LearnedState(bundle=tmp_path / "bundle")
    state.bundle.mkdir()
    learn(state, 1)
    return state


def assert_old_or_new(state):
    """What there was is there; of what is new each thing is whole, or not there."""
    assert state.numbers() in ([1], [1, 2])
    whole = [record.version for record in state.store.records()]
    assert whole in ([1], [1, 2])
    assert state.current() in whole
    assert list(ngrams_of(state).load()) in ([ROW], [(7, [1, 2, 3], 2)])
    assert not state.leftovers()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_each_call_that_changes_a_file_may_fail(learned, tmp_path, error):
    seen = set()
    for number in range(1, 200):
        state = LearnedState(bundle=shutil.copytree(learned.bundle, tmp_path / f"at-{number}"))
        failing = FailingWrites(number, error)
        with failing.installed():
            try:
                learn(state, 2)
            except (OSError, StateError) as raised:
                assert "\n" not in str(raised)
        if failing.failed is None:
            break
        seen.add(failing.failed)
        assert_old_or_new(state)
        with FailingWrites(0, error).installed():
            learn(state, 3)
        assert state.numbers()[-1] == 3
        assert state.current() == state.store.records()[-1].version
    assert number > 20
    assert seen == {
        "open",
        "mkdir",
        "fsync",
        "replace",
        "chmod",
        "write_bytes",
        "write_text",
        "export_adapter",
    }


ON_A_SMALL_DISK = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from learned_state import LearnedState
state = LearnedState(bundle=Path(sys.argv[2]))
full = 0
version = 0
for number in range(1, 10000):
    try:
        state.append(number)
    except OSError:
        full += 1
        break
state.buffer.forget()
for number in range(1, 10000):
    try:
        version = state.add_version()
        state.store.use(version)
    except OSError:
        full += 1
        break
print(full, state.current() in (version, version - 1), state.current() > 1, state.leftovers())
os.system(f"mount -o remount,ro {sys.argv[2]}")
from omnidraft_npu.state_folder import learning, ngrams_path
from omnidraft_npu.errors import StateError
try:
    with learning(state.bundle, "target"):
        print("it learns")
except StateError as error:
    print(state.current() > 1, error)
"""


def test_a_real_disk_that_is_full_and_then_read_only(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    script = f'mount -t tmpfs -o size=300k none "{folder}" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a file system of its own cannot be mounted here")
    child = [sys.executable, "-c", ON_A_SMALL_DISK, str(Path(__file__).parents[1]), str(folder)]
    result = subprocess.run([*command, *child], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    full, read_only = result.stdout.splitlines()
    assert full == "2 True True []"
    assert read_only.startswith("True cannot write to")
    assert "Read-only" in read_only
