"""Context binaries, really made: for the chip asked for, whole, and never at a crash's price."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.errors import BundleError, ConfigError, ExportError
from omnidraft_npu.qnn.binary import check_context_binary, read_context_binary
from omnidraft_npu.quantize import compile as module
from omnidraft_npu.quantize.compile import check_compilable, compile_graphs
from omnidraft_npu.quantize.compile_child import FAILED
from omnidraft_npu.quantize.graph_writer import GraphWriter
from omnidraft_npu.quantize.tensor_file import TensorFile

pytest.importorskip("onnxruntime_qnn")
X_ELITE, ELITE = find_chip("x-elite"), find_chip("8-elite")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """One product of 64 x 64 weights, of 1 and of 8 rows: as small as a graph gets."""
    folder = tmp_path_factory.mktemp("graphs")
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    paths = {length: folder / f"length_{length}.onnx" for length in (1, 8)}
    with TensorFile(folder / "weights.data") as file:
        for length, path in paths.items():
            with GraphWriter(path, file, opset=21) as graph:
                x = graph.input("x", np.float32, (1, length, 64))
                graph.node("MatMul", [x, graph.tensor("weight", weight)], "y")
                graph.output("y", np.float32, (1, length, 64))
    return paths


def test_a_binary_is_for_the_chip_asked_for_and_for_no_other(graphs, tmp_path):
    made = compile_graphs(graphs, tmp_path, [X_ELITE])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "length_1_ctx.onnx",
        "length_1_ctx_qnn.bin",
        "length_8_ctx.onnx",
        "length_8_ctx_qnn.bin",
    ]
    for path in made.values():
        assert read_context_binary(path).targets == (("SC8380XP", 73),)
        check_context_binary(path, X_ELITE)
        with pytest.raises(BundleError, match=r"SC8380XP.*Snapdragon 8 Elite.*--soc 8-elite"):
            check_context_binary(path, ELITE)
        with pytest.raises(BundleError, match=r"made by.* QNN .*1\.0\.0"):
            check_context_binary(path, X_ELITE, qnn_version="1.0.0")


def test_one_binary_can_hold_the_code_of_two_chips(graphs, tmp_path):
    made = compile_graphs({1: graphs[1]}, tmp_path, [X_ELITE, ELITE])
    for chip in (X_ELITE, ELITE):
        check_context_binary(made[1], chip)


def test_lengths_that_share_their_weights_name_one_binary(graphs, tmp_path):
    """Only the last session writes it, and both graphs must point to it."""
    made = compile_graphs(graphs, tmp_path, [X_ELITE], share_weights=True)
    assert len({read_context_binary(path).binary for path in made.values()}) == 1
    assert len(list(tmp_path.glob("*.bin"))) == 1


def test_a_binary_for_another_chip_than_was_asked_for_is_refused(graphs, tmp_path, monkeypatch):
    """As QNN makes one where it takes one soc_model for another."""
    real = module._run_child

    def other_chip(command):
        job = command[-1].replace(f"[{X_ELITE.soc_model}]", f"[{ELITE.soc_model}]")
        return real([*command[:-1], job])

    monkeypatch.setattr(module, "_run_child", other_chip)
    with pytest.raises(ExportError, match=r"did not make what it was asked for.*SM8750"):
        compile_graphs({1: graphs[1]}, tmp_path, [X_ELITE])


def test_a_graph_that_qnn_cannot_compile_is_one_line(tmp_path):
    (tmp_path / "length_1.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"QNN cannot compile length_1\.onnx for.*X Elite"):
        compile_graphs({1: tmp_path / "length_1.onnx"}, tmp_path, [X_ELITE])


def test_a_full_disk_is_told_as_such(graphs, tmp_path, monkeypatch):
    """QNN says that it failed to write a file, and another recipe was advised."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000))
    monkeypatch.setattr(module, "_run_child", lambda command: (FAILED, "Failed to write"))
    with pytest.raises(OSError, match="No space left on device"):
        compile_graphs({1: graphs[1]}, tmp_path, [X_ELITE])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL, as when memory"),
        ("raise SystemExit(7)", "ended with code 7"),
    ],
)
def test_a_crash_of_qnn_is_an_error_of_the_export_and_no_more(
    graphs, tmp_path, monkeypatch, code, words
):
    real = module._run_child
    monkeypatch.setattr(module, "_run_child", lambda command: real([command[0], "-c", code]))
    with pytest.raises(ExportError, match=re.escape(words)):
        compile_graphs({1: graphs[1]}, tmp_path, [X_ELITE])


def test_the_compiling_process_ends_with_the_export(graphs, tmp_path):
    """It takes gigabytes: none may be left behind. A closed stdin is what a dead parent leaves."""
    job = {
        "graphs": [[str(graphs[1]), str(tmp_path / "length_1_ctx.onnx")]],
        "soc_models": [X_ELITE.soc_model],
        "share_weights": False,
    }
    command = [sys.executable, "-m", "omnidraft_npu.quantize.compile_child", json.dumps(job)]
    left = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert left.returncode == FAILED
    assert list(tmp_path.iterdir()) == []


def test_a_chip_that_this_qnn_does_not_know_is_refused_before_any_work():
    with pytest.raises(ConfigError, match=r"Snapdragon 778G here.*soc_model, 35"):
        check_compilable([X_ELITE, find_chip("778g")])
