"""A context binary that QNN crashes on harms a process of its own, once on a machine."""

import json
import sys

import pytest

from omnidraft_npu.errors import DeviceError
from omnidraft_npu.qnn import first_load
from omnidraft_npu.qnn.first_load import check_first_load

CRASHES = "import os; os.abort()"
FAULTS = "import ctypes; ctypes.string_at(0)"


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Stands in for the process that loads; counts its starts."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "store"))
    starts = []

    def stand_in(code):
        def command(graphs, soc_model):
            starts.append(soc_model)
            return [sys.executable, "-S", "-c", code]

        monkeypatch.setattr(first_load, "_command", command)
        return starts

    return stand_in


def check(tmp_path, *digests, soc_model=60, **options):
    check_first_load([tmp_path / "a_ctx.onnx"], digests or ["1"], soc_model=soc_model, **options)


@pytest.mark.parametrize("code", [CRASHES, FAULTS])
def test_a_crash_is_an_error_of_the_device_and_is_remembered(child, tmp_path, code):
    starts = child(code)
    for _ in range(3):
        with pytest.raises(DeviceError) as told:
            check(tmp_path)
    assert len(starts) == 1
    assert "QNN crashed (" in str(told.value)
    assert str(tmp_path) in str(told.value)
    (kept,) = (tmp_path / "store").rglob("*.json")
    assert str(told.value).endswith(f"delete {kept}")
    kept.unlink()
    child("")
    check(tmp_path)


@pytest.mark.parametrize("code", ["", "raise SystemExit(10)", "raise SystemExit(1)"])
def test_what_does_not_crash_is_loaded_here_from_then_on_at_once(child, tmp_path, code):
    starts = child(code)
    for _ in range(3):
        check(tmp_path)
    assert len(starts) == 1


def test_a_process_that_hangs_is_stopped(child, tmp_path):
    child("import time; time.sleep(60)")
    with pytest.raises(DeviceError, match=r"gave no answer in 0 s"):
        check(tmp_path, timeout_s=0.3)


def test_other_binaries_another_chip_and_another_qnn_are_tried_again(child, tmp_path, monkeypatch):
    starts = child("")
    for digests, soc_model in ((["1"], 60), (["2"], 60), (["1", "2"], 60), (["1"], 69)):
        check(tmp_path, *digests, soc_model=soc_model)
    check(tmp_path, "2", "1")  # the order says nothing
    assert len(starts) == 4
    monkeypatch.setattr(first_load, "installed_qnn_version", lambda: "9.9.9")
    check(tmp_path)
    assert len(starts) == 5


def test_a_process_that_cannot_be_started_is_an_error_of_the_device(child, tmp_path, monkeypatch):
    child("")
    monkeypatch.setattr(first_load, "_command", lambda *_: [str(tmp_path / "missing")])
    with pytest.raises(DeviceError, match="cannot be started"):
        check(tmp_path)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"crash": 5}', "{}", "\x00"])
def test_a_damaged_record_is_made_anew(child, tmp_path, damage):
    starts = child("")
    check(tmp_path)
    (kept,) = (tmp_path / "store").rglob("*.json")
    kept.write_text(damage)
    check(tmp_path)
    assert len(starts) == 2
    assert json.loads(kept.read_text()) == {"crash": ""}


def test_a_store_that_cannot_be_written_stops_nothing(child, tmp_path, monkeypatch):
    starts = child("")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "file"))
    check(tmp_path)
    check(tmp_path)
    assert len(starts) == 2
