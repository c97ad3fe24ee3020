"""The old bundle stays, or comes back, until the new one is in its place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from learned_state import LearnedState

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.errors import BundleError, ExportError, StateError
from omnidraft_npu.quantize import placing
from omnidraft_npu.quantize.placing import check_output, put_in_place
from omnidraft_npu.replacement import remove_replaced, restore
from omnidraft_npu.state_folder import learning


def folder(path: Path, word: str) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(word)
    return path


def test_a_replaced_bundle_hands_over_its_state(tmp_path):
    old, new = folder(tmp_path / "out", "old"), folder(tmp_path / "out.partial", "new")
    (old / "state").mkdir()
    (old / "state" / "learned").write_text("precious")
    put_in_place(new, old)
    assert (old / "manifest.json").read_text() == "new"
    assert (old / "state" / "learned").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_rename_that_fails_puts_the_old_bundle_back_and_keeps_the_new(tmp_path, monkeypatch):
    old, new = folder(tmp_path / "out", "old"), folder(tmp_path / "out.partial", "new")
    real = Path.replace

    def refuse(self, target):
        if self == new:
            raise PermissionError(13, "Access is denied")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError):
        put_in_place(new, old)
    assert (old / "manifest.json").read_text() == "old"
    assert (new / "manifest.json").read_text() == "new"


def test_a_crash_between_the_renames_is_mended_at_the_next_export(tmp_path):
    folder(tmp_path / "out.replaced", "old")
    check_output(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "manifest.json").read_text() == "old"
    assert not (tmp_path / "out.replaced").exists()


def test_a_crash_before_the_state_moved_is_mended_at_the_next_export(tmp_path):
    old = folder(tmp_path / "out.replaced", "old")
    (old / "state").mkdir()
    (old / "state" / "learned").write_text("precious")
    folder(tmp_path / "out", "new")
    check_output(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "state" / "learned").read_text() == "precious"
    assert (tmp_path / "out" / "manifest.json").read_text() == "new"
    assert not old.exists()


def learn(bundle, *numbers):
    state = LearnedState(bundle=bundle)
    for number in numbers:
        state.append(number)
    return state


def names(path):
    return sorted(one.name for one in path.iterdir())


@pytest.mark.parametrize("opens", [restore, lambda path: check_output(path, force=True)])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_a_replacement_that_ends_after_any_rename_is_mended(tmp_path, opens, num_steps):
    """By whoever opens the bundle, too: a `run` in between began a state of its own."""
    old, new = folder(tmp_path / "out", "old"), folder(tmp_path / "out.partial", "new")
    learn(old, 1, 2)
    replaced = tmp_path / "out.replaced"
    steps = [
        (old, replaced),
        (replaced / "state", new / "state"),
        (new, old),
        (replaced, tmp_path / ".out.removed"),
    ]
    for source, target in steps[:num_steps]:
        source.rename(target)
    opens(tmp_path / "out")
    assert (old / "manifest.json").read_text() == ("new" if num_steps > 2 else "old")
    assert LearnedState(bundle=old).numbers() == [1, 2]
    assert names(tmp_path) == (["out"] if num_steps > 2 else ["out", "out.partial"])
    assert num_steps > 2 or names(new) == ["manifest.json"]


def test_what_an_earlier_version_left_is_joined_with_what_was_learned_since(tmp_path):
    """It lost 19 of 20 examples and the only adapter at the second export."""
    old, new = folder(tmp_path / "out.replaced", "old"), folder(tmp_path / "out", "new")
    state = learn(old, *range(1, 21))
    state.store.use(state.add_version())
    learn(new, 99)
    restore(new)
    found = LearnedState(bundle=new)
    assert sorted(found.numbers()) == [*range(1, 21), 99]
    assert found.current() == 1
    assert names(tmp_path) == ["out"]


def test_what_cannot_be_joined_stays_is_named_and_is_in_nobodys_way(tmp_path, caplog):
    old, new = folder(tmp_path / "out.replaced", "old"), folder(tmp_path / "out", "new")
    learn(old, 1).add_version()
    learned = learn(new, 2)
    learned.store.add({"x": [[1.0]]}, parent=0)
    before = {p: p.read_bytes() for p in old.rglob("v0001*")}
    for _ in range(2):
        caplog.clear()
        restore(new)
        assert "v0001" in caplog.text
        assert "adapters import" in caplog.text
    with pytest.raises(ExportError, match="move it away"):
        check_output(new, force=True)
    assert {p: p.read_bytes() for p in old.rglob("v0001*")} == before
    assert learned.numbers() == [1, 2] or learned.numbers() == [2, 1]
    shutil.move(old, tmp_path / "elsewhere")
    check_output(new, force=True)


def test_a_folder_of_the_users_with_the_name_of_a_replaced_bundle_is_never_deleted(tmp_path):
    foreign, old = tmp_path / "out.replaced", folder(tmp_path / "out", "old")
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    restore(old)
    with pytest.raises(ExportError, match="is in the way: move it"):
        check_output(old, force=True)
    with pytest.raises(OSError, match="out"):
        put_in_place(folder(tmp_path / "out.partial", "new"), old)
    assert (foreign / "thesis.txt").exists()
    assert (old / "manifest.json").read_text() == "old"


def test_an_old_bundle_in_which_something_learned_is_left_is_never_deleted(tmp_path):
    folder(tmp_path / "out", "new")
    learn(folder(tmp_path / "out.replaced", "old"), 1)
    remove_replaced(tmp_path / "out")
    assert LearnedState(bundle=tmp_path / "out.replaced").numbers() == [1]


def test_a_missing_bundle_whose_replacement_never_came_opens_again(tmp_path):
    folder(tmp_path / "out.replaced", "not even JSON")
    with pytest.raises(BundleError, match=r"out/manifest\.json"):
        open_bundle(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_replacement_waits_for_a_learner_and_is_refused_when_it_goes_on(tmp_path, monkeypatch):
    old, new = folder(tmp_path / "out", "old"), folder(tmp_path / "out.partial", "new")
    learn(old, 1)
    monkeypatch.setattr(placing, "_OTHERS_S", 0.1)
    with learning(old, "target"):
        with pytest.raises(ExportError, match="another process is learning for target") as caught:
            put_in_place(new, old)
        assert "\n" not in str(caught.value)
        assert names(tmp_path) == ["out", "out.partial"]
    put_in_place(new, old)
    assert LearnedState(bundle=old).numbers() == [1]


LEARNER = """
import sys
from pathlib import Path
from omnidraft_npu.state_folder import learning
print("ready", flush=True)
sys.stdin.readline()
with learning(Path(sys.argv[1]), "target"):
    print("learning", flush=True)
"""


def test_a_learner_that_comes_while_no_bundle_is_there_waits_and_makes_none(tmp_path):
    """It made a folder in the new bundle's place, which then could not be put there."""
    old = folder(tmp_path / "out", "old")
    learn(old, 1)
    command = [sys.executable, "-c", LEARNER, str(old)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as learner:
        assert learner.stdout.readline() == "ready\n"
        old.rename(tmp_path / "out.replaced")
        learner.stdin.write("go\n")
        learner.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            learner.wait(timeout=0.5)
        assert not old.exists()
        restore(old)
        assert learner.stdout.readline() == "learning\n"
    assert LearnedState(bundle=old).numbers() == [1]


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_a_state_that_leads_out_of_the_bundle_is_refused_before_any_work(tmp_path):
    old, docs = folder(tmp_path / "out", "old"), tmp_path / "docs"
    docs.mkdir()
    (docs / "thesis.txt").write_text("years of work")
    (old / "state").symlink_to(docs)
    with pytest.raises(StateError, match="is a link"):
        check_output(old, force=True)
    assert names(docs) == ["thesis.txt"]


@pytest.mark.parametrize("name", ["loop", "x" * 250, "missing"])
def test_a_place_that_holds_no_bundle_is_one_error_whatever_its_name(tmp_path, name):
    if name == "loop" and os.name != "nt":
        (tmp_path / name).symlink_to(tmp_path / name)
    with pytest.raises(BundleError, match="is not a directory"):
        open_bundle(tmp_path / name)
