import struct
import sys
from pathlib import Path

import onnxruntime
import pytest

from omnidraft_npu.errors import DeviceError
from omnidraft_npu.qnn import installation, versions
from omnidraft_npu.qnn.installation import Installation, find_installation, library_problem
from omnidraft_npu.qnn.libraries import is_loadable, machine_of, process_machine
from omnidraft_npu.qnn.this_chip import chip_in
from omnidraft_npu.qnn.versions import check_packages


def elf(machine, order="<"):
    ident = b"\x7fELF\x02" + (b"\x01" if order == "<" else b"\x02") + bytes(10)
    return ident + struct.pack(f"{order}HH", 3, machine) + bytes(44)


def pe(machine, offset=0x80):
    head = bytearray(offset + 6)
    head[:2] = b"MZ"
    struct.pack_into("<I", head, 60, offset)
    head[offset : offset + 4] = b"PE\0\0"
    struct.pack_into("<H", head, offset + 4, machine)
    return bytes(head)


@pytest.mark.parametrize(
    ("content", "machine"),
    [
        (elf(0x3E), "x86_64"),
        (elf(0xB7), "arm64"),
        (elf(0xA4), "hexagon"),
        (elf(0x2A), "ELF machine 0x2a"),
        (elf(0x3E, ">"), "x86_64"),
        (pe(0x8664), "x86_64"),
        (pe(0xAA64, offset=0x400), "arm64"),
        (pe(0xA641), "arm64ec"),
        (pe(0x8664)[:100], None),
        (b"not a library at all" * 10, None),
        (b"\x7fELF", None),
        (b"", None),
    ],
)
def test_the_machine_type_is_read_from_the_header(tmp_path, content, machine):
    path = tmp_path / "library"
    path.write_bytes(content)
    assert machine_of(path) == machine


def test_this_python_is_of_the_process_s_own_type():
    assert machine_of(Path(sys.executable).resolve()) == process_machine()


def test_only_arm64ec_crosses_machine_types():
    assert is_loadable("x86_64", "x86_64")
    assert is_loadable("arm64ec", "x86_64")
    assert not is_loadable("arm64", "x86_64")
    assert not is_loadable("x86_64", "arm64")
    assert not is_loadable(None, "arm64")


def test_a_library_for_another_processor_is_named_with_what_to_do(tmp_path, monkeypatch):
    """onnxruntime#24508: a wheel carried libraries for another machine."""
    monkeypatch.setattr(installation, "process_machine", lambda: "x86_64")
    foreign, broken = tmp_path / "libQnnHtp.so", tmp_path / "libBroken.so"
    foreign.write_bytes(elf(0xB7))
    broken.write_text("not a library")
    problem = library_problem(foreign)
    assert problem is not None
    for word in (str(foreign), "is for arm64", "for x86_64", "pip install"):
        assert word in problem
    assert "damaged" in str(library_problem(broken))
    assert "missing.so is missing: reinstall" in str(library_problem(tmp_path / "missing.so"))
    (tmp_path / "good.so").write_bytes(elf(0x3E))
    assert library_problem(tmp_path / "good.so") is None


def test_a_library_that_was_copied_in_part_is_damaged_and_not_loaded(tmp_path):
    """The loader does not look: it dies of a bus error where the file ends."""
    whole = Path(onnxruntime.capi.onnxruntime_pybind11_state.__file__)
    cut = tmp_path / "libQnnHtp.so"
    cut.write_bytes(whole.read_bytes()[:-1])
    assert "libQnnHtp.so is damaged, it is cut short: reinstall" in str(library_problem(cut))
    assert library_problem(whole) is None


@pytest.mark.parametrize("name", ["libprovider.so", "libQnnHtp.so", "libQnnSystem.so"])
def test_each_library_that_this_process_loads_is_missed(tmp_path, monkeypatch, name):
    found = Installation(provider=tmp_path / "libprovider.so", htp=tmp_path / "libQnnHtp.so")
    monkeypatch.setattr(installation, "process_machine", lambda: "x86_64")
    monkeypatch.setattr(installation, "check_packages", list)
    monkeypatch.setattr(installation, "installed_libraries", lambda: found)
    for library in found.libraries:
        library.write_bytes(elf(0x3E))
    assert find_installation() == found
    (tmp_path / name).unlink()
    with pytest.raises(DeviceError, match=rf"{name} is missing: reinstall"):
        find_installation()


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"onnxruntime": "1.24.1", "onnxruntime-qnn": "2.7.0"}, ["onnxruntime 1.24.1", ">=1.24.2"]),
        ({"onnxruntime": "2.0.0", "onnxruntime-qnn": "2.7.0"}, ["onnxruntime 2.0.0", "<2"]),
        ({"onnxruntime": "1.32.0", "onnxruntime-qnn": "2.3.1"}, ["2.3.1", ">=2.4", "1.32.0 needs"]),
        ({"onnxruntime": "1.32.0", "onnxruntime-qnn": "1.22.0"}, ["1.22.0", "pip install"]),
        ({"onnxruntime": "1.32.0", "onnxruntime-qnn": None}, ["not installed", "pip install"]),
    ],
)
def test_versions_out_of_range_are_one_line(monkeypatch, installed, words):
    """onnxruntime-qnn#564: two versions that did not fit, and no word about it."""
    monkeypatch.setattr(versions, "installed_version", installed.get)
    with pytest.raises(DeviceError) as caught:
        find_installation()
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("core", "qnn"), [("1.24.2", "2.3.0"), ("1.26.9", "2.3.0"), ("1.27.0rc1", "2.4.0.dev1")]
)
def test_versions_at_the_edge_of_the_range_pass(monkeypatch, core, qnn):
    monkeypatch.setattr(
        versions, "installed_version", {"onnxruntime": core, "onnxruntime-qnn": qnn}.get
    )
    assert [package.problem for package in check_packages()] == [None, None]


@pytest.mark.parametrize(
    ("description", "key"),
    [
        ("Snapdragon(R) X Elite - X1E78100 - Qualcomm(R) Oryon(TM) CPU", "x-elite"),
        ("Snapdragon(R) X 12-core X1E80100 @ 3.40 GHz", "x-elite"),
        ("Snapdragon(R) X2 Elite - X2E88100", "x2-elite"),
        ("SM8750-AC", "8-elite"),
        ("QCS6490\n", "qcs6490"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", None),
        ("AMD EPYC 7B13", None),
        ("SM8150", "855"),
        ("", None),
    ],
)
def test_a_processor_s_name_tells_its_chip(description, key):
    chip = chip_in(description)
    assert (chip.key if chip else None) == key


def test_a_package_that_cannot_be_imported_is_one_line(monkeypatch, tmp_path):
    """As with a half-installed wheel, or one whose library lacks another library."""
    (tmp_path / "onnxruntime_qnn.py").write_text('raise ImportError("DLL load failed")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime_qnn", raising=False)
    monkeypatch.setattr(installation, "check_packages", list)
    with pytest.raises(DeviceError, match=r"DLL load failed.*--force-reinstall") as caught:
        find_installation()
    assert "\n" not in str(caught.value)
