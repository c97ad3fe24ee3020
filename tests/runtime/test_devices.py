"""Where models run is chosen and said; no QNN is needed to see that."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from npu_bundle import CONTEXT, LENGTHS, write_npu_bundle
from tiny_bundle import write_bundle

from omnidraft_npu.chips.table import chip_named, find_chip
from omnidraft_npu.cli import cli
from omnidraft_npu.config import DecodeConfig, DeviceConfig
from omnidraft_npu.errors import DeviceError
from omnidraft_npu.qnn.provider import HtpDevice
from omnidraft_npu.runtime import devices
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.providers import open_cpu_session
from omnidraft_npu.runtime.session import open_session

CPU = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_npu_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def npu(monkeypatch, tmp_path):
    """An NPU that is none: its graphs run on the CPU provider."""
    state = SimpleNamespace(opened=[], kind="npu", error=None)

    def find(*, simulate):
        if state.error is not None:
            raise state.error
        return HtpDevice(kind=state.kind, library=tmp_path, ep_devices=())

    def open_session(path, *, soc_model, simulate):
        state.opened.append((path.name, soc_model))
        return open_cpu_session(path, threads=1)

    monkeypatch.setattr(devices, "find_htp", find)
    monkeypatch.setattr(devices, "open_qnn_session", open_session)
    return state


def run(bundle, *options):
    arguments = ["run", "-b", str(bundle), "--json", "--raw", "--max-new-tokens", "12"]
    return CliRunner().invoke(cli, [*arguments, *options, "abc cab"])


def stats(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["stats"]


def test_auto_takes_the_npu_where_there_is_one(bundle, npu, caplog):
    pair = open_pair(bundle, devices=DeviceConfig(soc="x-elite"))
    assert pair.notice is None
    assert "no binaries of tiny for Snapdragon X Elite" in caplog.text
    for model in (pair.target, pair.drafter):
        assert model.graph.provider == "QNNExecutionProvider (HTP, soc 60)"
        assert model.graph.context_length == CONTEXT
        assert model.precision == "fp16"
    assert len(npu.opened) == 2 * len(LENGTHS)


def test_graphs_that_lose_more_than_they_may_are_told(bundle, npu, tmp_path, caplog):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    document = json.loads((root / "manifest.json").read_text())
    document["drafter"]["htp"]["is_accurate"] = False
    (root / "manifest.json").write_text(json.dumps(document))
    open_pair(root, devices=DeviceConfig(soc="x-elite"))
    assert caplog.text.count("lose more than their recipe may") == 1
    assert f"of tiny lose more than their recipe may; `omnidraft-npu inspect {root}`" in caplog.text


def test_graphs_that_a_chip_without_fp16_refuses_are_to_be_exported_for_it(
    bundle, npu, monkeypatch
):
    def refuse(path, *, soc_model, simulate):
        raise DeviceError("QNN_COMMON_ERROR_MEM_ALLOC")

    monkeypatch.setattr(devices, "open_qnn_session", refuse)
    result = run(bundle, "--soc", "qcs6490", "--target-device", "npu")
    assert result.exit_code == 5
    last = result.stderr.strip().splitlines()[-1]
    assert (
        "not made for Dragonwing QCS6490" in last and "export the bundle with --soc qcs6490" in last
    )
    other = run(bundle, "--soc", "x-elite", "--target-device", "npu")
    assert other.exit_code == 4
    assert "QNN_COMMON_ERROR_MEM_ALLOC" in other.stderr


def test_auto_without_npu_runs_on_the_cpu_and_says_why_once(bundle, npu):
    npu.error = DeviceError("the driver sleeps")
    result = run(bundle)
    assert stats(result)["target_provider"] == stats(result)["draft_provider"] == CPU
    assert result.stderr.count("target and drafter on the CPU: the driver sleeps") == 1


def test_nothing_is_told_of_the_npu_where_there_can_be_none_and_none_is_meant(
    tmp_path, npu, monkeypatch
):
    from tiny_bundle import write_bundle

    from omnidraft_npu.qnn.diagnosis import Host

    npu.error = DeviceError("there is no NPU")
    plain = write_bundle(tmp_path / "plain")
    monkeypatch.setattr(Host, "may_have_npu", False)
    told = "target and drafter on the CPU: there is no NPU"
    assert told not in run(plain).stderr
    assert told in run(plain, "--simulate").stderr
    assert told in run(write_npu_bundle(tmp_path / "npu")).stderr
    monkeypatch.setattr(Host, "may_have_npu", True)
    assert told in run(plain).stderr
    strict = run(plain, "--target-device", "npu")
    assert strict.exit_code == 4


def test_binaries_that_qnn_crashes_on_leave_auto_on_the_cpu_and_npu_refused(
    bundle, npu, monkeypatch, tmp_path
):
    """Without a chip, a process that crashes stands in for the one that loads."""
    import sys

    from omnidraft_npu.qnn import first_load

    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    binary = tmp_path / "a.bin"
    binary.write_bytes(b"x")
    monkeypatch.setattr(devices, "_graph_paths", lambda *_: [{}])
    monkeypatch.setattr(devices, "_binaries", lambda *_: {"1": "a_ctx.onnx"})
    monkeypatch.setattr(devices, "read_context_binary", lambda _: SimpleNamespace(binary=binary))
    crash = [sys.executable, "-S", "-c", "import os; os.abort()"]
    monkeypatch.setattr(first_load, "_command", lambda *_: crash)
    result = run(bundle, "--soc", "x-elite")
    assert stats(result)["target_provider"] == CPU
    assert result.stderr.count("target and drafter on the CPU: QNN crashed") == 1
    strict = run(bundle, "--soc", "x-elite", "--target-device", "npu")
    assert strict.exit_code == 4
    assert strict.stderr.splitlines()[-1].startswith("Error: QNN crashed (")
    assert npu.opened == []


def test_a_bundle_without_npu_graphs_is_told_to_be_exported_again(tmp_path, npu):
    bundle = write_bundle(tmp_path / "plain")
    result = run(bundle)
    assert stats(result)["target_provider"] == CPU
    assert "no graphs of other for the NPU" in result.stderr
    strict = run(bundle, "--target-device", "npu")
    assert strict.exit_code == 5
    assert "--soc" in strict.stderr


def test_npu_is_strict_for_each_model_alone(bundle, npu):
    npu.error = DeviceError("the driver sleeps")
    for option in ("--target-device", "--draft-device"):
        result = run(bundle, option, "npu")
        assert result.exit_code == 4
        assert result.stdout == ""
        assert result.stderr.strip().splitlines()[-1] == "Error: the driver sleeps"
    assert stats(run(bundle, "--draft-device", "npu", "--no-draft"))["target_provider"] == CPU


LONG = "abc cab bca " * 8
"""More tokens than the graphs of the NPU hold, fewer than that of the CPU."""


def long_run(bundle, *options):
    arguments = ["run", "-b", str(bundle), "--raw", "--soc", "x-elite", "--max-new-tokens", "4"]
    return CliRunner().invoke(cli, [*arguments, *options, LONG])


def test_auto_takes_the_cpu_for_a_prompt_that_only_its_graph_holds(bundle, npu):
    result = long_run(bundle, "--json")
    found = stats(result)
    assert found["target_provider"] == CPU
    assert found["draft_provider"] == "QNNExecutionProvider (HTP, soc 60)"
    assert list(found["placement"]["target"]) == ["cpu"]
    told = f"target on the CPU: the prompt is too long for the NPU's graphs, which hold {CONTEXT}"
    assert result.stderr.count(told) == 1
    on_cpu = long_run(bundle, "--json", "--target-device", "cpu", "--draft-device", "cpu")
    assert json.loads(result.stdout)["token_ids"] == json.loads(on_cpu.stdout)["token_ids"]


def test_npu_names_both_lengths_for_a_prompt_that_its_graphs_do_not_hold(bundle, npu):
    result = long_run(bundle, "--target-device", "npu")
    assert result.exit_code == 1
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert re.match(rf"Error: the prompt has \d+ tokens and the context holds {CONTEXT}:", last)
    assert "--htp-context-length" in last and "--target-device cpu" in last


def test_a_conversation_that_outgrows_the_npu_goes_on_on_the_cpu(bundle, npu, caplog):
    devices = DeviceConfig(soc="x-elite")
    session = open_session(bundle, devices=devices, threads=1)
    plain = open_session(bundle, use_drafter=False, devices=DeviceConfig(target_device="cpu"))
    config = DecodeConfig(max_new_tokens=4)
    short, long = (session.encode(text, raw=True) for text in ("abc cab", LONG))
    on_npu = [delta.stats.to_json()["target_provider"] for delta in session.generate(short, config)]
    assert "HTP" in on_npu[-1]
    caplog.clear()
    for _ in range(2):
        deltas = list(session.generate(long, config))
        expected = [token for delta in plain.generate(long, config) for token in delta.token_ids]
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert deltas[-1].stats.to_json()["target_provider"] == CPU
    assert caplog.text.count("target on the CPU") == 1


def test_bench_and_verify_decode_all_prompts_on_one_device(bundle, npu, tmp_path):
    rows = [json.dumps({"prompt": text, "task": "one"}) for text in ("abc cab", LONG)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    common = ["-b", str(bundle), "--prompts", str(tmp_path / "p.jsonl"), "--json", "--raw"]
    common += ["--max-new-tokens", "4", "--draft-tokens", "2", "--soc", "x-elite"]
    for command, more in (("verify", ()), ("bench", ("--repeats", "1"))):
        result = CliRunner().invoke(cli, [command, *common, *more])
        assert result.exit_code == 0, result.output
        assert result.stderr.count("target on the CPU: the prompt is too long") == 1
        found = json.loads(result.stdout)
        placed = found if command == "verify" else found["environment"]
        assert list(placed["placement"]["target"]) == ["cpu"]
        assert {row["target_provider"] for row in found.get("rows", ())} <= {CPU}
        strict = CliRunner().invoke(cli, [command, *common, *more, "--target-device", "npu"])
        assert strict.exit_code == 1
        assert re.search(rf"prompt 2 has \d+ tokens .* holds {CONTEXT}", strict.stderr)


def test_a_drafter_on_the_npu_drafts_past_its_context(bundle, npu):
    """It follows the later part of the text; the target's context is that of the CPU."""
    options = ["--target-device", "cpu", "--draft-device", "npu", "--proposer", "model"]
    result = long_run(bundle, "--json", *options)
    assert stats(result)["proposed"] > 0
    assert "HTP" in stats(result)["draft_provider"]


def test_plain_output_says_what_cut_the_text(bundle, npu):
    arguments = ["run", "-b", str(bundle), "--raw", "--soc", "x-elite", "--max-new-tokens"]
    full = CliRunner().invoke(cli, [*arguments, "500", "abc cab bca " * 6])
    assert f"the context of {CONTEXT} tokens is full" in full.stderr.splitlines()[-1]
    assert "--htp-context-length" in full.stderr.splitlines()[-1]
    cut = CliRunner().invoke(cli, [*arguments, "3", "abc cab"])
    assert cut.stderr.splitlines()[-1] == "the text was cut at --max-new-tokens 3"


def test_longer_drafts_than_the_npu_verifies_in_a_pass_are_told_once(bundle, npu):
    verify_length = LENGTHS[1]
    told = "verifies 3 drafts in a pass"
    for k in (verify_length, 40):
        result = run(bundle, "--soc", "x-elite", "--draft-tokens", str(k))
        assert result.stderr.count(told) == 1
        assert f"--verify-length {min(k + 1, 32)}" in result.stderr
    for options in (
        ["--draft-tokens", str(verify_length - 1)],
        ["--draft-tokens", "8", "--no-draft"],
        ["--draft-tokens", "8", "--target-device", "cpu"],
    ):
        assert told not in run(bundle, "--soc", "x-elite", *options).stderr


def test_cpu_is_taken_without_a_word(bundle, npu):
    result = run(bundle, "--target-device", "cpu", "--draft-device", "cpu")
    assert stats(result)["target_provider"] == CPU
    assert "on the CPU:" not in result.stderr
    assert npu.opened == []


def test_each_model_has_its_own_device(bundle, npu):
    options = ["--soc", "8 elite", "--target-device", "cpu", "--draft-device", "npu"]
    found = stats(run(bundle, *options, "--proposer", "model"))
    assert found["target_provider"] == CPU
    assert found["draft_provider"] == "QNNExecutionProvider (HTP, soc 69)"
    placed = found["placement"]
    assert list(placed["target"]) == ["cpu"]
    assert list(placed["drafter"]) == [f"htp {length}" for length in LENGTHS]
    # These are what really ran: the NPU of this test is the CPU provider.
    assert {name for model in placed.values() for g in model.values() for name in g} == {CPU}
    assert found["proposed"] > 0


def test_bench_and_verify_know_the_same_devices(bundle, npu, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc cab", "task": "one"}\n')
    common = ["-b", str(bundle), "--prompts", str(tmp_path / "p.jsonl"), "--json", "--raw"]
    common += ["--max-new-tokens", "6", "--draft-tokens", "2", "--soc", "x-elite"]
    checked = CliRunner().invoke(cli, ["verify", *common, "--draft-device", "cpu"])
    assert checked.exit_code == 0, checked.output
    found = json.loads(checked.stdout)
    assert (found["target_provider"], found["draft_provider"]) == (
        "QNNExecutionProvider (HTP, soc 60)",
        CPU,
    )
    measured = CliRunner().invoke(cli, ["bench", *common, "--repeats", "1"])
    assert measured.exit_code == 0, measured.output
    environment = json.loads(measured.stdout)["environment"]
    assert list(environment["placement"]["target"]) == [f"htp {length}" for length in LENGTHS]
    assert environment["draft_provider"] == "QNNExecutionProvider (HTP, soc 60)"
    assert environment["target"]["precision"] == "fp16"
    npu.error = DeviceError("the driver sleeps")
    measured = CliRunner().invoke(cli, ["bench", *common, "--repeats", "1"])
    assert measured.stderr.count("the driver sleeps") == 1
    assert json.loads(measured.stdout)["environment"]["target"]["precision"] == "fp32"


def test_the_chip_is_the_one_named_else_this_machine_s_else_the_bundle_s(bundle, npu, monkeypatch):
    from omnidraft_npu.qnn import this_chip

    def soc_of(**settings):
        npu.opened.clear()
        open_pair(bundle, use_drafter=False, devices=DeviceConfig(**settings))
        return {soc for _, soc in npu.opened}

    monkeypatch.setattr(this_chip, "find_this_chip", lambda: find_chip("8 gen 3"))
    assert soc_of(soc="x2-elite") == {88}
    assert soc_of() == {57}
    monkeypatch.setattr(this_chip, "find_this_chip", lambda: None)
    result = run(bundle, "--target-device", "npu")
    assert result.exit_code == 4
    assert "name it with --soc" in result.stderr
    falling = run(bundle)
    assert stats(falling)["target_provider"] == CPU
    assert falling.stderr.count("name it with --soc") == 1
    monkeypatch.setattr(this_chip, "find_this_chip", lambda: chip_named("sm8150"))
    assert "Snapdragon 855 is too old" in run(bundle, "--target-device", "npu").stderr
    assert run(bundle, "--target-device", "npu").exit_code == 4
    assert stats(run(bundle))["target_provider"] == CPU
    npu.kind = "simulator"
    assert soc_of() == {60}


@pytest.mark.parametrize(
    ("soc", "code", "words"),
    [("no-such-chip", 2, "no chip 'no-such-chip'"), ("sm8150", 2, "too old")],
)
def test_a_chip_that_cannot_be_is_an_error_even_with_auto(bundle, npu, soc, code, words):
    result = run(bundle, "--soc", soc)
    assert result.exit_code == code
    assert words in result.stderr


def test_an_unknown_chip_is_an_error_also_where_nothing_asks_for_it(bundle):
    result = run(bundle, "--soc", "nope", "--target-device", "cpu", "--draft-device", "cpu")
    assert result.exit_code == 2
    assert "no chip 'nope'" in result.stderr


def test_the_simulator_says_which_chips_it_does_not_know(bundle, npu):
    npu.kind = "simulator"
    result = run(bundle, "--soc", "qcs6490", "--target-device", "npu")
    assert result.exit_code == 4
    assert "simulator does not know Dragonwing QCS6490" in result.stderr


def test_a_model_without_any_graph_that_can_run_names_both_reasons(bundle, npu, tmp_path):
    root = shutil.copytree(bundle, tmp_path / "bundle")
    document = json.loads((root / "manifest.json").read_text())
    for entry in (document["drafter"], *document["targets"].values()):
        entry["graphs"] = {}
    (root / "manifest.json").write_text(json.dumps(document))
    npu.error = DeviceError("the driver sleeps")
    result = run(root)
    assert result.exit_code == 5
    assert "no CPU graph, and the driver sleeps" in result.stderr
