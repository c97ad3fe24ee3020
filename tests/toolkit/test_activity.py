"""Commands that announce that they are at work."""

import subprocess
import sys

import pytest

from omnidraft_npu.activity import at_work, is_anyone_at_work

OTHER = """
import sys
from omnidraft_npu.activity import at_work
with at_work():
    print("at work", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_command_is_at_work_while_any_of_them_is(home):
    assert not is_anyone_at_work()
    with at_work():
        with at_work():
            assert is_anyone_at_work()
        assert is_anyone_at_work()
    assert not is_anyone_at_work()
    assert not list((home / "active").iterdir())


def test_a_command_that_was_killed_is_no_longer_at_work(home):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OTHER], **pipes) as other:
        assert other.stdout.readline() == "at work\n"
        assert is_anyone_at_work()
        assert list((home / "active").iterdir())
        other.kill()
        other.wait()
        assert not is_anyone_at_work()
    assert not list((home / "active").iterdir())


def test_a_store_that_cannot_be_written_stops_no_command(home):
    home.write_text("in the way")
    with at_work():
        assert not is_anyone_at_work()
