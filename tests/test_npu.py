"""End to end on real QNN: the HTP simulator runs the graphs, and drafting changes no text."""

import functools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
from npu_bundle import STATIC, write_npu_bundle
from simulated_htp import open_simulated, relative_error
from static_graphs import write_static_decoder

from omnidraft_npu.config import DecodeConfig, DeviceConfig
from omnidraft_npu.errors import BundleError, ConfigError, DeviceError
from omnidraft_npu.qnn.provider import QNN_PROVIDER, open_qnn_session, placement
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.providers import open_cpu_session
from omnidraft_npu.runtime.session import open_session
from omnidraft_npu.runtime.static_lm import StaticModel

SIMULATED = f"{QNN_PROVIDER} (simulated HTP, soc 60)"
CPU = "CPUExecutionProvider"
HTP_ERROR = 1e-2
"""Relative L2 of the logits that fp16 may cost."""
PROMPT = "abc cab bca"


@pytest.fixture(scope="module", autouse=True)
def simulator(tmp_path_factory):
    """Skips everything here where there is no simulator."""
    folder = tmp_path_factory.mktemp("probe")
    names = write_static_decoder(folder, (1,), STATIC)
    return open_simulated(folder / names["1"])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, simulator):
    """Drafter and targets compiled for an X Elite."""
    return write_npu_bundle(tmp_path_factory.mktemp("bundle"), compiled_for=("x-elite",))


def decode(bundle, *, prompt=PROMPT, k=3, **options):
    session = open_session(bundle, threads=1, **options)
    deltas = list(
        session.generate(
            session.encode(prompt, raw=True),
            DecodeConfig(max_new_tokens=16, max_draft_tokens=k),
        )
    )
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].stats.to_json()


def everywhere(draft, target):
    return DeviceConfig(draft_device=draft, target_device=target, simulate=True)


@pytest.mark.parametrize("target", ["other", "same"])
@pytest.mark.parametrize(
    ("draft_on", "target_on"), [("npu", "npu"), ("npu", "cpu"), ("cpu", "npu")]
)
def test_drafted_greedy_text_is_the_target_s_own(bundle, target, draft_on, target_on):
    options = {"target": target, "devices": everywhere(draft_on, target_on)}
    plain, alone = decode(bundle, use_drafter=False, **options)
    for k in (1, 3):
        drafted, stats = decode(bundle, k=k, proposer="model", **options)
        assert drafted == plain
        assert stats["proposed"] > 0
        assert stats["draft_provider"] == (SIMULATED if draft_on == "npu" else CPU)
        assert stats["target_provider"] == (SIMULATED if target_on == "npu" else CPU)
    assert alone["draft_provider"] is None
    assert len(set(plain)) > 1, "a text of one token shows nothing"
    if target == "same" and draft_on == target_on:
        assert stats["accepted"] > 0


def test_a_token_has_the_same_bits_alone_and_among_drafts(bundle):
    """One graph scores them all (docs/exactness.md says how far that goes)."""
    devices = everywhere("npu", "npu")
    graph = open_pair(bundle, use_drafter=False, devices=devices).target.graph
    ids = np.random.default_rng(2).integers(0, 40, 40).tolist()
    one, many = graph.begin(), graph.begin()
    for start in (0, 1, 7, 17, 35):
        for lm in (one, many):
            lm.reset()
            lm.prefill(ids[:start])
        rows = [one.score([token])[0].copy() for token in ids[start : start + 4]]
        np.testing.assert_array_equal(rows, many.score(ids[start : start + 4]))


def test_graphs_run_wholly_on_qnn_and_near_float32(bundle, tmp_path):
    names = write_static_decoder(tmp_path, (1, 4, 16), STATIC)
    paths = {int(length): tmp_path / name for length, name in names.items()}
    open_cpu = functools.partial(open_cpu_session, threads=1)
    simulated, exact = (
        StaticModel.open(paths, opening, provider="", vocab_size=40)
        for opening in (open_simulated, open_cpu)
    )
    for session in simulated.sessions.values():
        assert set(placement(session)) == {QNN_PROVIDER}
        assert placement(session)[QNN_PROVIDER] > 20
    ids = np.random.default_rng(3).integers(0, 40, 30).tolist()
    one, other = simulated.begin(is_exact=False), exact.begin(is_exact=False)
    for lm in (one, other):
        lm.prefill(ids[:14])
        lm.score(ids[20:23])
        lm.rewind(14)
    for start, n in ((14, 1), (15, 3), (18, 12)):
        rows, expected = (lm.score(ids[start : start + n]) for lm in (one, other))
        assert relative_error(rows, expected) < HTP_ERROR


def test_adapters_are_swapped_between_runs_without_a_new_session(tmp_path, monkeypatch):
    names = write_static_decoder(tmp_path, (4,), STATIC)
    paths = {int(length): tmp_path / name for length, name in names.items()}
    open_cpu = functools.partial(open_cpu_session, threads=1)
    simulated, exact = (
        StaticModel.open(paths, opening, provider="", vocab_size=40).begin()
        for opening in (open_simulated, open_cpu)
    )
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    rng = np.random.default_rng(4)
    shapes = simulated.model.signature.lora_inputs
    adapters = [
        {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    ]
    rows = []
    for adapter in (None, adapters[0], adapters[1], adapters[0], None):
        for lm in (simulated, exact):
            lm.reset()
            lm.set_lora(adapter)
        rows.append(simulated.score([5, 6, 7]).copy())
        assert relative_error(rows[-1], exact.score([5, 6, 7])) < HTP_ERROR
    np.testing.assert_array_equal(rows[1], rows[3])
    np.testing.assert_array_equal(rows[0], rows[4])
    assert relative_error(rows[1], rows[0]) > 5 * HTP_ERROR
    assert relative_error(rows[2], rows[1]) > 5 * HTP_ERROR


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "omnidraft_npu", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_a_fresh_process_loads_the_binaries_and_prints_nothing_but_its_document(bundle):
    devices = everywhere("npu", "npu")
    expected, _ = decode(bundle, devices=devices)
    pair = open_pair(bundle, devices=devices)
    for model in (pair.target, pair.drafter):
        for session in model.graph.sessions.values():
            assert placement(session) == {QNN_PROVIDER: 1}, "one node: the compiled graph"
    options = ["--simulate", "--raw", "--json", "--max-new-tokens", "16", "--draft-tokens", "3"]
    done = command("run", "-b", str(bundle), *options, PROMPT)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["token_ids"] == expected
    assert document["stats"]["target_provider"] == SIMULATED
    for model in document["stats"]["placement"].values():
        assert all(graph == {QNN_PROVIDER: 1} for graph in model.values())
    assert "LIBNATIVE" not in done.stderr
    assert "on the CPU:" not in done.stderr


def test_the_simulator_is_never_chosen_by_itself(bundle):
    done = command("run", "-b", str(bundle), "--raw", "--json", "--max-new-tokens", "2", PROMPT)
    assert json.loads(done.stdout)["stats"]["target_provider"] == CPU
    assert done.stderr.count("target and drafter on the CPU: ") == 1
    strict = command("run", "-b", str(bundle), "--target-device", "npu", PROMPT)
    assert strict.returncode == 4
    assert strict.stderr.count("\n") == 1
    assert "--simulate" in strict.stderr


def test_another_chip_is_compiled_for_on_the_spot_and_its_binary_is_not_taken_for_it(bundle):
    devices = DeviceConfig(simulate=True, soc="8 gen 3", target_device="npu")
    pair = open_pair(bundle, use_drafter=False, devices=devices)
    assert pair.target.graph.provider == f"{QNN_PROVIDER} (simulated HTP, soc 57)"
    assert all(placement(s)[QNN_PROVIDER] > 1 for s in pair.target.graph.sessions.values())


def test_a_near_sku_takes_the_binaries_of_the_chip_that_qnn_takes_it_for(bundle):
    """ai-hub-models#333: near SKUs were refused."""
    devices = DeviceConfig(simulate=True, soc="x1p42100", target_device="npu")
    pair = open_pair(bundle, use_drafter=False, devices=devices)
    assert all(placement(s) == {QNN_PROVIDER: 1} for s in pair.target.graph.sessions.values())


def test_the_process_of_a_first_load_loads_binaries_and_ends_well_where_qnn_refuses_one(
    bundle, tmp_path
):
    from omnidraft_npu.qnn import first_load

    folder = bundle / "drafter/htp/x-elite"
    graphs = sorted(folder.glob("*_ctx.onnx"))
    done = subprocess.run(first_load._command(graphs, 60), capture_output=True)
    assert done.returncode == 0, done.stderr
    broken = shutil.copytree(folder, tmp_path / "x-elite")
    binary = broken / "length_4_ctx_qnn.bin"
    binary.write_bytes(binary.read_bytes()[:-4096])
    graphs = sorted(broken.glob("*_ctx.onnx"))
    assert first_load._load_in_child(graphs, 60, 60.0) == ""
    done = subprocess.run(first_load._command(graphs, 60), capture_output=True)
    assert done.returncode == first_load._REFUSED


def test_a_damaged_binary_is_to_be_exported_again(bundle, tmp_path):
    made = shutil.copytree(bundle / "drafter/htp/x-elite", tmp_path / "x-elite")
    binary = made / "length_4_ctx_qnn.bin"
    binary.write_bytes(binary.read_bytes()[:-4096])
    with pytest.raises(BundleError, match=r"EpContext.*export the bundle again"):
        open_qnn_session(made / "length_4_ctx.onnx", soc_model=60, simulate=True)


def test_a_graph_that_qnn_takes_in_part_or_not_at_all_is_refused_with_the_reason(tmp_path):
    import onnx
    from onnx import TensorProto, helper

    x, z = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 8, 8]) for n in "xz")
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("Det", ["y"], ["d"]),
        helper.make_node("Reshape", ["d", "s"], ["r"]),
        helper.make_node("Add", ["y", "r"], ["z"]),
    ]
    to = helper.make_tensor("s", TensorProto.INT64, [3], [2, 1, 1])
    graph = helper.make_graph(nodes, "mixed", [x], [z], [to])
    opsets = [helper.make_opsetid("", 21)]
    path = tmp_path / "mixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    with pytest.raises(DeviceError, match="does not take Det"):
        open_qnn_session(path, soc_model=60, simulate=True)
    names = write_static_decoder(tmp_path, (1,), STATIC)
    with pytest.raises(DeviceError, match=r"takes no node.*omnidraft-npu devices"):
        open_qnn_session(tmp_path / names["1"], soc_model=999, simulate=True)
    with pytest.raises(ConfigError, match="'turbo'"):
        open_qnn_session(
            tmp_path / names["1"],
            soc_model=60,
            simulate=True,
            options={"htp_performance_mode": "turbo"},
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_to_be_spawned_instead_of_hanging(tmp_path, simulator):
    names = write_static_decoder(tmp_path, (1,), STATIC)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            open_qnn_session(tmp_path / names["1"], soc_model=60, simulate=True)
        except DeviceError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert b"spawn" in said.read()
    os.waitpid(child, 0)


def test_doctor_finds_the_simulator_working():
    done = command("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["backend htp"]["status"] == "ok"
    assert findings["QNN libraries"]["status"] == "ok"
    assert findings["NPU"]["status"] == "note"
    shown = command("doctor")
    assert len(shown.stdout.splitlines()) == len(findings)
    assert "ok    backend htp: runs" in shown.stdout
