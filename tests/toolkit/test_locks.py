"""One process at a time, and the truth about a lock that cannot be had."""

import os
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from omnidraft_npu.locks import exclusive


def refuse():
    raise RuntimeError("held")


def test_a_second_holder_is_told_and_one_that_waits_comes_after_the_first(tmp_path):
    path, is_waiting, order = tmp_path / "lock", threading.Event(), []

    def second():
        with exclusive(path, is_waiting.set):
            order.append("second")

    with exclusive(path, refuse):
        with pytest.raises(RuntimeError), exclusive(path, refuse):
            pass
        waiting = threading.Thread(target=second)
        waiting.start()
        assert is_waiting.wait(20)
        order.append("first")
    waiting.join(20)
    assert order == ["first", "second"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files")
def test_a_place_that_takes_no_files_is_not_held_by_another_process():
    """There `export` said that another process exported, and what waits would have hung."""
    with pytest.raises(OSError, match="/proc/"), exclusive(Path("/proc/lock"), refuse):
        pass


@pytest.mark.skipif(os.name == "nt", reason="Windows moves no folder with an open file in it")
def test_a_lock_whose_folder_is_moved_before_it_is_held_is_not_held(tmp_path, monkeypatch):
    """A killed export had moved it, and its holder made a folder in the bundle's place."""
    folder = tmp_path / "state"
    folder.mkdir()
    acquire = FileLock.acquire

    def late(self, *arguments, **options):
        held = acquire(self, *arguments, **options)
        folder.rename(tmp_path / "moved")
        return held

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(FileNotFoundError), exclusive(folder / "lock", refuse):
        pytest.fail("it is held")
    monkeypatch.undo()
    with exclusive(tmp_path / "moved" / "lock", refuse):
        pass
