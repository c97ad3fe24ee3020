"""The old bundle stays, or comes back, until the new one is in its place."""

from pathlib import Path

import pytest

from omnidraft_npu.quantize.placing import check_output, put_in_place


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
