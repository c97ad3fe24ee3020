"""The file of learned spellings: nothing is lost, and nothing wrong with it stops decoding."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ngram_rows import make_entries
from safetensors.numpy import save_file

from omnidraft_npu.bridge import ngram_file
from omnidraft_npu.bridge.ngram_entries import NgramEntries
from omnidraft_npu.bridge.ngram_file import (
    NgramStore,
    PairKey,
    read_entries,
    write_entries,
)
from omnidraft_npu.errors import BundleError
from omnidraft_npu.state_folder import ngrams_path

KEY = PairKey(drafter_sha256="d" * 64, target_sha256="t" * 64)
OTHER = PairKey(drafter_sha256="e" * 64, target_sha256="t" * 64)
ENTRIES = make_entries((7, [1, 2, 3], 1), (4, [2, 2], 5))


@pytest.fixture
def store(tmp_path):
    return NgramStore(path=ngrams_path(tmp_path, "target"), key=KEY)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_what_is_saved_is_loaded_again(store, tmp_path):
    assert len(store.load()) == 0
    store.save(ENTRIES)
    assert store.path == tmp_path / "state" / "ngrams" / "target.safetensors"
    assert list(store.load()) == list(ENTRIES)
    assert read_entries(store.path)[1] == KEY


def test_saving_adds_to_what_others_saved_meanwhile(store):
    store.save(ENTRIES)
    NgramStore(path=store.path, key=KEY).save(make_entries((9, [5, 5], 2)))
    store.save(make_entries((7, [1, 2, 3], 9)))
    assert list(store.load()) == [(9, [5, 5], 2), (4, [2, 2], 5), (7, [1, 2, 3], 10)]


SAVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ngram_rows import make_entries
from omnidraft_npu.bridge.ngram_file import NgramStore, PairKey
store = NgramStore(path=Path(sys.argv[2]), key=PairKey(drafter_sha256="d", target_sha256="t"))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    store.save(make_entries((7, [1, 2, 3], 1)))
"""


def test_two_processes_that_save_at_the_same_instant_lose_no_count(tmp_path):
    path = ngrams_path(tmp_path, "target")
    command = [sys.executable, "-c", SAVER, str(Path(__file__).parents[1]), str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    savers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for saver in savers:
        assert saver.stdout.readline() == "ready\n"
    for saver in savers:
        saver.stdin.write("go\n")
        saver.stdin.flush()
    for saver in savers:
        saver.communicate(timeout=60)
        assert saver.returncode == 0
    assert list(read_entries(path)[0]) == [(7, [1, 2, 3], 40)]
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_left_half_written_goes_with_the_next_save(store):
    store.path.parent.mkdir(parents=True)
    left = store.path.with_name(f".{store.path.name}.abc.tmp")
    others = store.path.with_name(".another.safetensors.abc.tmp")
    for path in (left, others):
        path.write_bytes(b"half")
    store.save(ENTRIES)
    assert not left.exists()
    assert others.exists()


def test_nothing_new_is_not_written(store):
    store.save(NgramEntries.EMPTY)
    assert not store.path.parent.exists()


def test_the_budget_holds_on_disk(store):
    store.max_bytes = 20
    store.save(ENTRIES)
    assert list(store.load()) == [(4, [2, 2], 5)]


def test_a_failing_rename_leaves_the_old_file(store, monkeypatch, caplog):
    store.save(ENTRIES)
    before = store.path.read_bytes()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        store.save(ENTRIES)
        store.save(ENTRIES)
    assert store.path.read_bytes() == before
    assert [p.name for p in store.path.parent.iterdir()] == [store.path.name]
    (message,) = warnings(caplog)
    assert "No space left on device" in message
    store.save(make_entries((9, [5, 5], 2)))
    assert len(store.load()) == 3


def test_a_full_disk_while_writing_is_said_and_leaves_the_old_file(store, monkeypatch, caplog):
    """The safetensors library raises an error of its own for it, which ended the decoding."""
    store.save(ENTRIES)

    def fail(self, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        store.save(ENTRIES)
    (message,) = warnings(caplog)
    assert "No space left on device" in message
    assert list(store.load()) == list(ENTRIES)


def test_a_folder_that_cannot_be_written_is_said_once(store, caplog):
    store.path.parent.parent.parent.mkdir(exist_ok=True)
    store.path.parent.parent.write_text("a file where the folder should be")
    for _ in range(3):
        assert len(store.load()) == 0
        store.save(ENTRIES)
    (message,) = warnings(caplog)
    assert "cannot be saved" in message
    assert str(store.path.parent) in message


def test_a_cache_for_other_tokenizers_is_named_ignored_and_left_alone(store, caplog):
    NgramStore(path=store.path, key=OTHER).save(ENTRIES)
    before = store.path.read_bytes()
    for _ in range(2):
        assert len(store.load()) == 0
    store.save(make_entries((9, [5, 5], 2)))
    (message,) = warnings(caplog)
    assert str(store.path) in message
    assert "other tokenizers" in message
    assert store.path.read_bytes() == before
    assert list(store.load()) == [(9, [5, 5], 2)]
    assert list(NgramStore(path=store.path, key=KEY).load()) == [(9, [5, 5], 2)]
    assert list(NgramStore(path=store.path, key=OTHER).load()) == list(ENTRIES)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-3],
        lambda data: b"",
        lambda data: b"\xff" * 8 + data,
        lambda data: b"GGUF" + bytes(100),
        lambda data: data.replace(b'"format_version":"1"', b'"format_version":"2"'),
    ],
)
def test_a_file_that_cannot_be_read_is_said_once_and_kept_aside(store, caplog, damage):
    store.save(ENTRIES)
    damaged = damage(store.path.read_bytes())
    store.path.write_bytes(damaged)
    with pytest.raises(BundleError, match=r"target\.safetensors is not an n-gram cache"):
        store.read()
    for _ in range(2):
        assert len(store.load()) == 0
    store.save(make_entries((9, [5, 5], 2)))
    (message,) = warnings(caplog)
    assert str(store.path) in message
    assert list(store.load()) == [(9, [5, 5], 2)]
    assert store.path.with_name("target.unreadable-1.safetensors").read_bytes() == damaged
    shutil.copy(store.path.with_name("target.unreadable-1.safetensors"), store.path)
    store.save(ENTRIES)
    assert store.path.with_name("target.unreadable-2.safetensors").read_bytes() == damaged


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": np.array([0, 3, 9], np.int32)},
        {"offsets": np.array([0, 4, 5], np.int32)},
        {"offsets": np.array([0, 3], np.int32)},
        {"offsets": np.array([1, 3, 5], np.int32)},
        {"offsets": np.zeros(0, np.int32)},
        {"token_ids": np.array([7, 7], np.int32)},
        {"token_ids": np.array([-7, 4], np.int32)},
        {"token_ids": np.array([7.0, 4.0], np.float32)},
        {"token_ids": np.array([[7, 4]], np.int32)},
        {"pieces": np.array([1, 2, 3, -2, 2], np.int32)},
        {"uses": np.array([0, 5], np.int32)},
        {"uses": np.array([5], np.int32)},
        {"uses": None},
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, changes):
    path = tmp_path / "x.safetensors"
    write_entries(path, ENTRIES, KEY)
    assert list(read_entries(path)[0]) == list(ENTRIES)
    arrays = {name: getattr(ENTRIES, name) for name in ngram_file._ARRAYS} | changes
    metadata = {
        "format_version": "1",
        "drafter_tokenizer_sha256": KEY.drafter_sha256,
        "target_tokenizer_sha256": KEY.target_sha256,
    }
    save_file({name: a for name, a in arrays.items() if a is not None}, path, metadata)
    with pytest.raises(BundleError, match=r"x\.safetensors is not"):
        read_entries(path)


def test_a_name_cannot_lead_out_of_the_folder(tmp_path):
    for name in ("../up", "a/b", "/etc/x"):
        with pytest.raises(BundleError, match="is a path"):
            ngrams_path(tmp_path, name)
