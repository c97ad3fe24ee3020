"""The record of the machine that a measurement was made on."""

import importlib.metadata
import json

from omnidraft_npu import __version__
from omnidraft_npu.machine import describe_machine


def test_versions_and_processor_are_named():
    found = json.loads(json.dumps(describe_machine()))
    assert found["omnidraft_npu"] == __version__
    assert found["numpy"] == importlib.metadata.version("numpy")
    assert found["onnxruntime"] == importlib.metadata.version("onnxruntime")
    assert found["num_cpus"] >= 1
    for name in ("python", "system", "machine", "cpu"):
        assert isinstance(found[name], str)
        assert found[name]


def test_a_package_that_is_absent_has_no_version(monkeypatch):
    version = importlib.metadata.version

    def without_qnn(name):
        if name == "onnxruntime-qnn":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_qnn)
    assert describe_machine()["onnxruntime_qnn"] is None
