"""A stage is finished and taken over, or its files are gone."""

import pytest

from omnidraft_npu.quantize.stages import Stages


def quiet(stage, done, total):
    del stage, done, total


def write(root, tell):
    tell(1, 1)
    (root / "file").write_text("made")
    return {"value": 1}


def fail(root, tell):
    del tell
    (root / "half").write_text("half")
    raise OSError("disk full")


def never(root, tell):
    raise AssertionError("a finished stage ran again")


def test_a_finished_stage_is_taken_over_by_the_same_work(tmp_path, caplog):
    caplog.set_level("INFO")
    root = tmp_path / "work.partial"
    assert Stages(root, {"a": 1}).run("first", "one", write, quiet) == {"value": 1}
    later = Stages(root, {"a": 1})
    assert later.run("first", "one", never, quiet) == {"value": 1}
    assert [path.name for path in later.files()] == ["file"]
    assert later.seconds == {}
    assert caplog.messages == [f"taking over what an earlier run finished in {root}"]


def test_other_work_begins_from_nothing_and_says_so(tmp_path, caplog):
    """Hours of work were dropped without a word where an option was another."""
    root = tmp_path / "work.partial"
    Stages(root, {"a": 1}).run("first", "one", write, quiet)
    other = Stages(root, {"a": 2})
    with pytest.raises(AssertionError):
        other.run("first", "one", never, quiet)
    assert other.files() == []
    assert caplog.messages == [f"dropping {root}: it was made with other options"]


def test_a_failed_stage_leaves_no_file_and_finished_ones_stay(tmp_path):
    root = tmp_path / "work.partial"
    stages = Stages(root, {"a": 1})
    stages.run("first", "one", write, quiet)
    with pytest.raises(OSError, match="disk full"):
        stages.run("second", "two", fail, quiet)
    assert [path.name for path in stages.files()] == ["file"]
    stages.discard_if_empty()
    assert root.exists()
    assert "kept" in stages.advice()


def test_nothing_is_left_when_no_stage_finished(tmp_path):
    root = tmp_path / "work.partial"
    stages = Stages(root, {"a": 1})
    with pytest.raises(OSError, match="disk full"):
        stages.run("first", "one", fail, quiet)
    stages.discard_if_empty()
    assert not root.exists()


def test_a_run_that_failed_before_its_first_stage_drops_nothing_of_an_earlier_one(tmp_path):
    """A slip in an option, found early, cost the finished stages of an interrupted export."""
    root = tmp_path / "work.partial"
    Stages(root, {"a": 1}).run("first", "one", write, quiet)
    Stages(root, {"a": 2}).discard()
    assert Stages(root, {"a": 1}).run("first", "one", never, quiet) == {"value": 1}


def test_forgetting_drops_the_book_keeping_only(tmp_path):
    stages = Stages(tmp_path / "work.partial", {})
    stages.run("first", "one", write, quiet)
    Stages.forget(stages.root)
    left = [path.name for path in stages.root.rglob("*") if path.is_file()]
    assert left == ["file"]


@pytest.mark.parametrize("content", [b"", b"[1]", b"[" * 100_000, b"\xff", b'{"value": NaN}'])
def test_a_damaged_mark_is_reported_and_its_stage_done_again(tmp_path, caplog, content):
    """A mark that a full disk had cut ended every later export in a traceback."""
    root = tmp_path / "work"
    Stages(root, {"a": 1}).run("first", "one", write, quiet)
    (root / ".stages" / "one.json").write_bytes(content)
    assert Stages(root, {"a": 1}).run("first", "one", write, quiet) == {"value": 1}
    assert "one.json" in caplog.text
    (root / ".stages" / "identity.json").write_bytes(content)
    assert Stages(root, {"a": 1}).run("first", "one", write, quiet) == {"value": 1}
    assert "identity.json" in caplog.text
