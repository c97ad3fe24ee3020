import dataclasses
import struct
import sys
from pathlib import Path

import pytest

from omnidraft_npu.chips.table import chip_named, find_chip
from omnidraft_npu.errors import DeviceError
from omnidraft_npu.qnn import diagnosis, installation, probe, versions
from omnidraft_npu.qnn.diagnosis import Host, diagnose
from omnidraft_npu.qnn.installation import Installation
from omnidraft_npu.qnn.probe import Probe, probe_backend

X86 = Host(
    system="linux", machine="x86_64", processor="x86_64", environment={}, devices=Path("/none")
)


def elf(machine):
    """The head of a library for a kind of machine."""
    return b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", machine) + bytes(44)


def installed_in(folder):
    return Installation(provider=folder / "libprovider.so", htp=folder / "libQnnHtp.so")


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
    monkeypatch.setattr(diagnosis, "installed_libraries", lambda: installed_in(libraries))
    monkeypatch.setattr(diagnosis, "_libraries", lambda installation: iter(()))
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


def test_a_chip_that_is_too_old_is_told_so_and_nothing_is_to_be_mended(board, monkeypatch):
    """GenieX#1235: old chips were not told that they only have their CPU."""
    monkeypatch.setattr(diagnosis, "find_this_chip", lambda: chip_named("sm8150"))
    findings = found(board, nothing_is_probed)
    assert {finding.status for finding in findings.values()} == {"ok", "note"}
    assert "Snapdragon 855 is too old: its NPU is Hexagon v66" in findings["NPU"].found
    assert "kernel" not in findings and "ADSP_LIBRARY_PATH" not in findings


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


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A folder with libraries for this process, and one for the NPU itself."""
    monkeypatch.setattr(diagnosis, "installed_libraries", lambda: installed_in(tmp_path))
    monkeypatch.setattr(installation, "process_machine", lambda: "x86_64")
    for path in (*installed_in(tmp_path).libraries, tmp_path / "libQnnGpu.so"):
        path.write_bytes(elf(0x3E))
    (tmp_path / "libQnnHtpV73Skel.so").write_bytes(elf(0xA4))
    return tmp_path


def nothing_is_probed(backend):
    pytest.fail(f"{backend} would only say again what is wrong")


def test_libraries_that_are_all_there_are_one_line(libraries):
    finding = found(X86)["QNN libraries"]
    assert finding.status == "ok"
    assert finding.found.startswith("4 for ")


@pytest.mark.parametrize("name", ["libprovider.so", "libQnnHtp.so", "libQnnSystem.so"])
def test_a_missing_library_is_told_once_with_its_fix(libraries, name):
    (libraries / name).unlink()
    findings = list(diagnose(X86, nothing_is_probed))
    wrong = [finding for finding in findings if finding.status == "wrong"]
    assert [finding.name for finding in wrong] == ["QNN libraries"]
    assert wrong[0].found == f"the QNN library {libraries / name} is missing"
    assert wrong[0].fix == "reinstall it with `pip install --force-reinstall onnxruntime-qnn`"
    lines = [f"{finding.found}: {finding.fix}" for finding in findings]
    assert sum("pip install" in line for line in lines) == 1


def test_every_library_that_does_not_fit_has_a_line_of_its_own(libraries):
    (libraries / "libQnnHtp.so").write_bytes(elf(0xF3))
    (libraries / "libQnnGpu.so").write_bytes(b"junk")
    wrong = [one.found for one in diagnose(X86, nothing_is_probed) if one.status == "wrong"]
    assert len(wrong) == 2
    assert "libQnnHtp.so is for ELF machine 0xf3" in wrong[0]
    assert "libQnnGpu.so is damaged" in wrong[1]


def test_a_version_that_does_not_fit_is_told_once_with_its_fix(libraries, monkeypatch):
    monkeypatch.setattr(
        versions, "installed_version", {"onnxruntime": "1.32.0", "onnxruntime-qnn": "2.3.1"}.get
    )
    findings = list(diagnose(X86, nothing_is_probed))
    (wrong,) = [finding for finding in findings if finding.status == "wrong"]
    assert wrong.found == "2.3.1, needed is >=2.4,<3"
    assert wrong.fix == "pip install 'onnxruntime-qnn>=2.4,<3'"


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
    assert "SIGABRT" in crashed.answer or "status" in crashed.answer
    instead("import time; time.sleep(60)")
    hung = probe_backend("htp", timeout_s=0.5)
    assert not hung.is_working
    assert "no answer in" in hung.answer
    instead("raise SystemExit('it said this')")
    assert "it said this" in probe_backend("htp").answer


ANSWER = '{"is_working": true, "answer": "runs", "devices": ["CPU"]}'


@pytest.mark.parametrize("after", ["bye from a library", "{}", "[1]", "5", '{"is_working": 1}', ""])
def test_what_native_code_prints_after_the_answer_is_passed_over(monkeypatch, after):
    run = probe.subprocess.run
    code = f"print('before'); print({ANSWER!r}); print({after!r}, end='')"
    monkeypatch.setattr(
        probe.subprocess, "run", lambda _, **options: run([sys.executable, "-c", code], **options)
    )
    assert probe_backend("htp") == Probe(
        backend="htp", is_working=True, answer="runs", devices=("CPU",)
    )


def test_a_probe_without_an_answer_or_that_cannot_be_started_is_a_finding(monkeypatch):
    run = probe.subprocess.run

    def start(_, **options):
        return run([sys.executable, "-c", "print('no answer')"], **options)

    monkeypatch.setattr(probe.subprocess, "run", start)
    assert "without an answer" in probe_backend("htp").answer
    monkeypatch.setattr(probe.sys, "executable", "/nothing/here")
    monkeypatch.setattr(probe.subprocess, "run", run)
    assert "cannot be started (No such file" in probe_backend("htp").answer


def test_what_qnn_answers_of_backends_that_no_model_needs_is_not_repeated():
    findings = found(X86, answers(said="runs"))
    assert findings["backend gpu"].found == "does not run here, and no model needs it"


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, False),
        ({"processor": "AMD64 ARMv8 (64-bit) Family 8"}, True),
        ({"machine": "arm64"}, False),
        ({"machine": "arm64", "system": "darwin"}, False),
        ({"machine": "arm64", "system": "win32"}, True),
    ],
)
def test_where_no_npu_can_be_is_known(changes, may):
    assert dataclasses.replace(X86, **changes).may_have_npu is may


def test_a_board_with_its_kernel_device_may_have_an_npu(board):
    assert board.may_have_npu


def test_a_package_that_cannot_be_imported_is_told_to_be_reinstalled(monkeypatch):
    def fail():
        raise DeviceError("onnxruntime-qnn cannot be loaded (no such DLL): reinstall it")

    monkeypatch.setattr(diagnosis, "installed_libraries", fail)
    last = list(diagnosis.diagnose(probe=lambda name: pytest.fail("nothing is left to probe")))[-1]
    assert (last.name, last.status, last.fix) == ("onnxruntime-qnn", "wrong", "reinstall it")
    assert "no such DLL" in last.found
