"""How a device is found and named, with devices that are none; tests/test_npu.py has real ones."""

import os
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest

from omnidraft_npu.errors import BundleError, DeviceError
from omnidraft_npu.qnn import provider
from omnidraft_npu.qnn.installation import Installation
from omnidraft_npu.qnn.provider import find_htp, open_qnn_session, placement
from omnidraft_npu.qnn.stdout import stdout_fd_to_stderr

KIND = onnxruntime.OrtHardwareDeviceType


@pytest.fixture
def machine(monkeypatch):
    """What QNN finds, and whether this is an x86_64 process."""

    def be(*kinds, is_x86=False):
        devices = tuple(SimpleNamespace(device=SimpleNamespace(type=kind)) for kind in kinds)
        found = Installation(provider=Path("libprovider.so"), htp=Path("libQnnHtp.so"))
        monkeypatch.setattr(provider, "find_installation", lambda: found)
        monkeypatch.setattr(provider, "qnn_devices", lambda installation: devices)
        monkeypatch.setattr(provider, "is_simulator_host", lambda: is_x86)
        return devices

    return be


@pytest.mark.parametrize("simulate", [False, True])
def test_an_npu_is_taken_alone_from_what_qnn_finds(machine, simulate):
    devices = machine(KIND.CPU, KIND.NPU, KIND.GPU)
    found = find_htp(simulate=simulate)
    assert found.kind == "npu"
    assert found.ep_devices == (devices[1],)
    assert found.describe(60) == "QNNExecutionProvider (HTP, soc 60)"


def test_a_machine_with_a_driverless_npu_is_sent_to_the_doctor(machine):
    machine(KIND.CPU, KIND.GPU)
    for simulate in (False, True):
        with pytest.raises(DeviceError, match=r"no NPU.*driver.*doctor"):
            find_htp(simulate=simulate)


def test_the_simulator_is_taken_only_when_asked_for(machine, monkeypatch):
    devices = machine(KIND.CPU, is_x86=True)
    found = find_htp(simulate=True)
    assert (found.kind, found.ep_devices) == ("simulator", devices)
    assert "simulated" in found.describe(60)
    monkeypatch.setattr(provider, "find_installation", lambda: pytest.fail("QNN was loaded"))
    with pytest.raises(DeviceError, match=r"no NPU.*ARM64.*--simulate"):
        find_htp(simulate=False)


def test_other_systems_have_no_npu(machine, monkeypatch):
    machine(KIND.NPU)
    monkeypatch.setattr(provider.sys, "platform", "darwin")
    with pytest.raises(DeviceError, match="no NPU on darwin"):
        find_htp(simulate=True)


def test_a_missing_graph_is_told_before_qnn_is_touched(tmp_path):
    with pytest.raises(BundleError, match=r"no\.onnx is missing"):
        open_qnn_session(tmp_path / "no.onnx", soc_model=60, simulate=True)


def test_placement_counts_nodes_by_provider():
    def part(name, count):
        return SimpleNamespace(ep_name=name, get_nodes=lambda: [None] * count)

    parts = [part("QNN", 3), part("CPU", 1), part("QNN", 2)]
    session = SimpleNamespace(get_provider_graph_assignment_info=lambda: parts)
    assert placement(session) == {"QNN": 5, "CPU": 1}


def test_nobody_asks_for_the_list_of_providers():
    """onnxruntime#27832: the QNN provider is a plug-in and never shows in that list."""
    root = Path(__file__).parents[2]
    sources = [
        p for name in ("toolkit", "runtime", "quantize") for p in (root / name).rglob("*.py")
    ]
    assert len(sources) > 100
    for path in sources:
        assert "get_available_providers" not in path.read_text(encoding="utf-8"), path


def test_what_native_code_prints_goes_to_stderr_but_for_the_simulator_s_line(capfd):
    with stdout_fd_to_stderr():
        os.write(1, b" # LIBNATIVE: No alternate configuration\nsomething else\n")
    os.write(1, b"text\n")
    out, err = capfd.readouterr()
    assert out == "text\n"
    assert err == "something else\n"
