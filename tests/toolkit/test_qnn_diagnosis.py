import dataclasses
import sys
from pathlib import Path

import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.errors import DeviceError
from omnidraft_npu.qnn import diagnosis, probe
from omnidraft_npu.qnn.diagnosis import Host, diagnose
from omnidraft_npu.qnn.probe import Probe, probe_backend

X86 = Host(
    system="linux", machine="x86_64", processor="x86_64", environment={}, devices=Path("/none")
)


def answers(htp=True, devices=("CPU",), said="runs"):
    def answer(backend):
        works = htp and backend == "htp"
        return Probe(
            backend=backend, is_working=works, answer=said if works else "no", devices=devices
        )

    return answer


def found(host, probing=None):
    return {finding.name: finding for finding in diagnose(host, probing or answers())}


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A Linux board with an NPU whose libraries and kernel are as they should be."""
    libraries, devices = tmp_path / "libraries", tmp_path / "dev"
    libraries.mkdir()
    devices.mkdir()
    (libraries / "libQnnHtp.so").write_bytes(b"")
    (libraries / "libQnnHtpV68Skel.so").write_bytes(b"")
    (devices / "fastrpc-cdsp").write_bytes(b"")
    monkeypatch.setattr(diagnosis, "_library_folder", lambda: libraries)
    monkeypatch.setattr(diagnosis, "_libraries", lambda folder: iter(()))
    monkeypatch.setattr(diagnosis, "find_this_chip", lambda: find_chip("qcs6490"))
    return Host(
        system="linux",
        machine="arm64",
        processor="aarch64",
        environment={"ADSP_LIBRARY_PATH": f"/nowhere;{libraries}"},
        devices=devices,
    )


NPU = answers(devices=("CPU", "NPU"))


def test_an_x86_machine_without_npu_is_not_ill():
    findings = found(X86)
    assert findings["NPU"].status == "note"
    assert "--simulate" in findings["NPU"].found
    assert "kernel" not in findings and "ADSP_LIBRARY_PATH" not in findings
    assert findings["backend htp"].status == "ok"
    assert findings["backend gpu"].status == "note"
    assert {f.status for f in findings.values()} == {"ok", "note"}


def test_a_board_where_all_is_right_is_not_ill(board):
    findings = found(board, NPU)
    assert {f.status for f in findings.values()} - {"note"} == {"ok"}
    assert "QCS6490 (v68)" in findings["NPU"].found


def test_a_missing_adsp_library_path_is_told_with_the_command(board):
    for environment in ({}, {"ADSP_LIBRARY_PATH": "/nowhere;/else"}):
        finding = found(dataclasses.replace(board, environment=environment), NPU)
        finding = finding["ADSP_LIBRARY_PATH"]
        assert finding.status == "wrong"
        assert finding.fix is not None
        assert finding.fix.startswith("export ADSP_LIBRARY_PATH='")
        assert "libraries" in finding.fix


def test_a_skeleton_that_no_wheel_brings_is_asked_of_the_sdk(board, monkeypatch):
    monkeypatch.setattr(diagnosis, "find_this_chip", lambda: find_chip("sm8975"))
    finding = found(board, NPU)["ADSP_LIBRARY_PATH"]
    assert finding.status == "wrong"
    assert "libQnnHtpV85Skel.so" in str(finding.fix)
    assert "SDK" in str(finding.fix)


def test_a_kernel_without_fastrpc_and_one_that_refuses_are_told_apart(board, monkeypatch):
    refusing = found(board, NPU)
    assert refusing["kernel"].status == "ok"
    monkeypatch.setattr(diagnosis.os, "access", lambda path, mode: False)
    assert "may not open" in found(board, NPU)["kernel"].found
    (board.devices / "fastrpc-cdsp").unlink()
    missing = found(board, NPU)["kernel"]
    assert missing.status == "wrong"
    assert "fastrpc-cdsp" in missing.found


def test_an_arm_machine_whose_npu_qnn_does_not_see_is_ill(board):
    finding = found(board, answers(devices=("CPU", "GPU")))["NPU"]
    assert finding.status == "wrong"
    assert "CPU, GPU" in finding.found
    assert "driver" in str(finding.fix)


def test_an_emulated_python_on_windows_is_told_to_be_replaced():
    host = dataclasses.replace(
        X86, system="win32", processor="ARM64 ARMv8 (64-bit) Family 8, Qualcomm"
    )
    findings = found(host)
    assert findings["python"].status == "wrong"
    assert "ARM64" in str(findings["python"].fix)
    assert findings["NPU"].status == "wrong"


def test_an_htp_backend_that_fails_is_wrong_and_the_others_are_notes():
    findings = found(X86, answers(htp=False))
    assert findings["backend htp"].status == "wrong"
    assert findings["backend htp"].fix
    assert findings["backend cpu"].status == "note"


def test_a_foreign_library_is_found(tmp_path, monkeypatch):
    (tmp_path / "libQnnHtp.so").write_bytes(
        b"\x7fELF\x02\x01" + bytes(12) + b"\xf3\x00" + bytes(44)
    )
    (tmp_path / "libQnnHtpV73Skel.so").write_bytes(
        b"\x7fELF\x01\x01" + bytes(12) + b"\xa4\x00" + bytes(44)
    )
    monkeypatch.setattr(diagnosis, "_library_folder", lambda: tmp_path)
    finding = found(X86)["QNN libraries"]
    assert finding.status == "wrong"
    assert "libQnnHtp.so" in finding.found and "machine 0xf3" in finding.found
    (tmp_path / "libQnnHtp.so").unlink()
    assert "there are none" in found(X86)["QNN libraries"].found


def test_a_backend_that_crashes_or_hangs_harms_only_its_own_process(monkeypatch):
    """onnxruntime#23431: the process quit without a word while it loaded a model."""
    run = probe.subprocess.run

    def instead(code):
        def start(command, **options):
            return run([sys.executable, "-c", code], **options)

        monkeypatch.setattr(probe.subprocess, "run", start)

    instead("import os; os.abort()")
    crashed = probe_backend("htp")
    assert not crashed.is_working
    assert "status -6" in crashed.answer or "status 3" in crashed.answer
    instead("import time; time.sleep(60)")
    hung = probe_backend("htp", timeout_s=0.5)
    assert not hung.is_working
    assert "no answer in" in hung.answer
    instead("raise SystemExit('it said this')")
    assert "it said this" in probe_backend("htp").answer


def test_a_package_that_cannot_be_imported_is_told_to_be_reinstalled(monkeypatch):
    def fail():
        raise DeviceError("onnxruntime-qnn cannot be loaded (no such DLL): reinstall it")

    monkeypatch.setattr(diagnosis, "installed_libraries", fail)
    last = list(diagnosis.diagnose(probe=lambda name: pytest.fail("nothing is left to probe")))[-1]
    assert (last.name, last.status, last.fix) == ("onnxruntime-qnn", "wrong", "reinstall it")
    assert "no such DLL" in last.found
