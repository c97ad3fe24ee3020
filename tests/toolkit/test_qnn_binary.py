import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.errors import BundleError
from omnidraft_npu.qnn.binary import (
    check_context_binary,
    installed_qnn_version,
    read_context_binary,
)


def attribute(name, value):
    return b"\n\x10" + name + b'"' + bytes([len(value)]) + value


def write(folder, *, targets=(("SC8380XP", 73),), version=b"v2.51.0.260929181845", binary=b"m.bin"):
    text = b";".join(b"soc_type=%s;arch=%d;num_nsps=1" % (n.encode(), a) for n, a in targets)
    graph = attribute(b"ep_cache_context", binary) + attribute(b"ep_sdk_version", version)
    (folder / "m_ctx.onnx").write_bytes(b"\x08\n" + graph + b"\xa0\x01\x03")
    (folder / "m.bin").write_bytes(b"\0\1\2" * 999 + text + b"\0" * 50)
    return folder / "m_ctx.onnx"


def test_chip_and_qnn_are_read_back_from_the_files(tmp_path):
    found = read_context_binary(write(tmp_path, targets=(("SM8650", 75), ("SC8380XP", 73))))
    assert found.targets == (("SC8380XP", 73), ("SM8650", 75))
    assert found.qnn_version == "2.51.0"
    assert found.binary == tmp_path / "m.bin"


def test_a_binary_of_the_right_chip_and_an_older_qnn_passes(tmp_path):
    path = write(tmp_path)
    for version in ("2.51.0", "2.51.1", "2.100.0", "3.0.0", "", None):
        check_context_binary(path, find_chip("x-elite"), qnn_version=version)


def test_a_binary_of_another_chip_is_named_with_both(tmp_path):
    """onnxruntime#23171: a device refuses it with a number, and the simulator takes it."""
    path = write(tmp_path)
    with pytest.raises(BundleError) as caught:
        check_context_binary(path, find_chip("8 gen 3"))
    for word in ("SC8380XP (v73)", "Snapdragon 8 Gen 3 (v75)", "--soc 8-gen-3", "m.bin"):
        assert word in str(caught.value)
    # The simulator cannot name this one, so its Hexagon version has to do.
    with pytest.raises(BundleError, match="v68"):
        check_context_binary(path, find_chip("qcs6490"))


@pytest.mark.parametrize("version", ["2.50.9", "1.99.0", "2.9.0"])
def test_a_binary_of_a_newer_qnn_is_refused_with_both_versions(tmp_path, version):
    with pytest.raises(BundleError) as caught:
        check_context_binary(write(tmp_path), find_chip("x-elite"), qnn_version=version)
    for word in ("2.51.0", version, "onnxruntime-qnn"):
        assert word in str(caught.value)


def test_missing_empty_and_strange_files_are_one_line(tmp_path):
    path = write(tmp_path)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(BundleError, match=r"m\.bin is missing"):
        read_context_binary(path)
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(BundleError, match="cannot be read"):
        read_context_binary(path)
    (tmp_path / "m.bin").write_bytes(b"something else")
    with pytest.raises(BundleError, match="no context binary"):
        read_context_binary(path)
    with pytest.raises(BundleError, match="is missing"):
        read_context_binary(tmp_path / "nothing_ctx.onnx")
    with pytest.raises(BundleError):
        read_context_binary(write(tmp_path, binary=b"../../m.bin"))


def test_the_installed_qnn_says_its_version():
    assert installed_qnn_version() == "" or installed_qnn_version().count(".") == 2
