"""One process at a time, and the truth about a lock that cannot be had."""

import threading
from pathlib import Path

import pytest

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
