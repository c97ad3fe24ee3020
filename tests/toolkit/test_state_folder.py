"""`state/` of a bundle: one learner at a time, whoever dies."""

import subprocess
import sys
from pathlib import Path

import pytest

from omnidraft_npu.errors import BundleError, StateError
from omnidraft_npu.state_folder import adapters_path, learning, replay_path

LEARNER = """
import sys
from pathlib import Path
from omnidraft_npu.state_folder import learning
with learning(Path(sys.argv[1]), "target"):
    print("learning", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def learner(tmp_path):
    """Another process that learns for `target` until it is told to end."""
    command = [sys.executable, "-c", LEARNER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "learning\n"
        yield process
        process.kill()


def test_a_second_learner_is_told_so_in_one_line_and_does_not_wait(learner, tmp_path):
    busy = pytest.raises(StateError, match="another process is learning for target")
    with busy as caught, learning(tmp_path, "target"):
        pytest.fail("two learn at once")
    assert "\n" not in str(caught.value)
    assert "--no-learn" in str(caught.value)


def test_another_target_can_be_learned_for_at_the_same_time(learner, tmp_path):
    with learning(tmp_path, "other"):
        pass


def test_a_learner_that_was_killed_frees_the_place_and_its_leftovers_go(learner, tmp_path):
    halves = []
    for folder in (adapters_path(tmp_path, "target"), replay_path(tmp_path, "target")):
        folder.mkdir(parents=True)
        halves.append(folder / ".v0002.json.abc.tmp")
        halves[-1].write_bytes(b"half")
        (folder / "v0001.json").write_text("{}")
    learner.kill()
    learner.wait()
    with learning(tmp_path, "target"):
        assert not any(half.exists() for half in halves)
    assert (adapters_path(tmp_path, "target") / "v0001.json").exists()


def test_the_place_is_free_again_afterwards_and_nothing_is_left(tmp_path):
    for _ in range(2):
        with learning(tmp_path, "target"):
            pass
    assert not list((tmp_path / "state").iterdir())


def test_an_error_while_learning_is_not_taken_for_one_of_the_lock(tmp_path):
    with pytest.raises(OSError, match="mine"), learning(tmp_path, "target"):
        raise OSError("mine")


def test_a_state_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(StateError, match="cannot write to") as caught, learning(tmp_path, "target"):
        pytest.fail("it cannot be written")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", [adapters_path, replay_path])
def test_a_name_cannot_lead_out_of_the_folder(tmp_path, where):
    for name in ("../up", "a/b", "/etc/x", ".."):
        with pytest.raises(BundleError, match="is a path"):
            where(tmp_path, name)
    assert Path(where(tmp_path, "a")).is_relative_to(tmp_path / "state")
