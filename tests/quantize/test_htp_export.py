"""`export --soc`: static graphs and binaries in the bundle, or one line before any work is done."""

import dataclasses
import json
import shlex
import shutil

import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.chips.table import find_chip
from omnidraft_npu.cli import cli
from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import DEFAULT_RANK
from omnidraft_npu.qnn.binary import check_context_binary
from omnidraft_npu.quantize import export as export_module
from omnidraft_npu.quantize import htp_stage
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.htp_model import HtpModel, check_htp
from omnidraft_npu.quantize.htp_request import HtpOptions, HtpRequest

pytest.importorskip("onnxruntime_qnn")
SMALL = ("--precision", "fp32", "--context-length", "64", "--htp-context-length", "32")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for i, name in enumerate(("drafter", "target")):
        write_checkpoint(root / name, vocab_size=280, seed=i, num_hidden_layers=1)
    return root


def export(checkpoints, output, *extra):
    models = [f"--{role}={checkpoints / role}" for role in ("drafter", "target")]
    return CliRunner().invoke(cli, ["export", *models, "-o", str(output), *SMALL, *extra])


def error_of(result, code):
    assert result.exit_code == code, result.output + repr(result.exception)
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def bundle(checkpoints, tmp_path_factory):
    """In fp16, for one chip, with a verify graph of another length than usual."""
    output = tmp_path_factory.mktemp("export") / "bundle"
    extra = ("--soc", "Snapdragon X Elite", "--htp-precision", "fp16", "--verify-length", "5")
    result = export(checkpoints, output, *extra)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return open_bundle(output, verify=True)


def test_both_models_have_graphs_and_binaries_for_the_chip(bundle):
    models = (bundle.manifest.drafter, bundle.target(None))
    for model in models:
        htp = model.htp
        assert (htp.precision, htp.context_length, list(htp.graphs)) == (
            "fp16",
            32,
            ["1", "5", "32"],
        )
        assert htp.loads_on_simulator
        assert list(htp.compiled) == ["x-elite"]
        assert list(htp.compiled["x-elite"]) == list(htp.graphs)
        for path in htp.compiled["x-elite"].values():
            check_context_binary(bundle.path(path), find_chip("x-elite"))
    assert models[1].htp.graphs["5"] == "targets/target/htp/length_5.onnx"


def test_inspect_shows_what_was_compiled(bundle):
    shown = CliRunner().invoke(cli, ["inspect", str(bundle.root)]).stdout
    assert "htp fp16" in shown
    assert "fp16 graphs of 1, 5, 32 tokens; compiled for x-elite by QNN 2." in shown


def test_an_export_that_was_stopped_takes_up_the_chips_that_are_done(
    checkpoints, tmp_path, monkeypatch
):
    """The second chip fails; the run after that compiles for no other, and leaves nothing half."""
    real, chips = htp_stage.compile_graphs, []

    def compile_one(graphs, folder, which, **options):
        chips.append(which[0].key)
        if len(chips) == 2:
            (folder / "length_1_ctx_qnn.bin").write_bytes(b"half")
            raise KeyboardInterrupt
        return real(graphs, folder, which, **options)

    monkeypatch.setattr(htp_stage, "compile_graphs", compile_one)
    extra = ("--soc", "x-elite", "--soc", "sm8750-ac", "--htp-precision", "fp16")
    models = [f"--{role}={checkpoints / 'drafter'}" for role in ("drafter", "target")]
    command = ["export", *models, "-o", str(tmp_path / "bundle"), *SMALL, *extra]
    stopped = CliRunner().invoke(cli, command)
    assert stopped.exit_code == 130
    said = f"finished parts are kept in {tmp_path / 'bundle.partial'}; go on with: "
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith(said)]
    again = shlex.split(line.removeprefix(said))
    assert again[0] == "omnidraft-npu"
    assert not list(tmp_path.rglob("8-elite/*"))
    assert list(tmp_path.rglob("x-elite/length_1_ctx.onnx"))
    monkeypatch.setattr(
        htp_stage, "compile_graphs", lambda g, f, which, **_: chips.append(which) or {}
    )
    CliRunner().invoke(cli, again[1:])
    assert [one[0].key for one in chips[2:]] == ["8-elite", "x-elite", "8-elite"]


@pytest.mark.parametrize(
    ("extra", "chips"),
    [
        (("--soc", "x-elite", "--share-weights"), ["x-elite"]),
        (("--soc", "x-elite", "--soc", "8-elite", "--one-binary"), ["x-elite", "8-elite"]),
    ],
)
def test_a_binary_that_only_a_device_loads_is_marked(
    checkpoints, tmp_path, monkeypatch, extra, chips
):
    asked = []

    def compile_nothing(graphs, folder, which, *, share_weights, tell):
        asked.append(([chip.key for chip in which], share_weights))
        path = folder / "length_1_ctx.onnx"
        path.write_bytes(b"graph")
        return {1: path}

    monkeypatch.setattr(htp_stage, "compile_graphs", compile_nothing)
    output = tmp_path / "bundle"
    result = export(checkpoints, output, "--htp-precision", "fp16", *extra)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert asked == [(chips, "--share-weights" in extra)] * 2
    htp = open_bundle(output).manifest.drafter.htp
    assert htp.loads_on_simulator is False
    assert htp.compiled == {
        chip: {"1": f"drafter/htp/{'+'.join(chips)}/length_1_ctx.onnx"} for chip in chips
    }
    shown = CliRunner().invoke(cli, ["inspect", str(output)]).stdout
    assert "not loadable on the simulator" in shown


@pytest.fixture
def nothing_made(monkeypatch):
    """Whatever fails must do so before a model is worked on."""
    monkeypatch.setattr(export_module, "export_model", lambda *_: pytest.fail("work was done"))


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (("--soc", "x-elit"), 2, "near it are x-elite"),
        (("--soc", "sm8150"), 2, "too old: its NPU is Hexagon v66"),
        (("--soc", "778g"), 2, "this QNN does not know its soc_model, 35"),
        (("--soc", "x-elite", "--verify-length", "33"), 2, "verify_length is 33"),
        (("--soc", "x-elite", "--verify-length", "1"), 2, "verify_length is 1"),
        (("--soc", "x-elite", "--htp-context-length", "8"), 2, "htp_context_length is 8"),
        (
            ("--soc", "x-elite", "--htp-context-length", "65"),
            2,
            "--htp-context-length 65 is more than --context-length 64",
        ),
        (("--soc", "x-elite", "--htp-precision", "w2a16"), 2, "choose from fp16"),
        (("--htp-precision", "fp16"), 2, "--htp-precision is about the NPU"),
        (("--calibration", "x.jsonl"), 2, "--calibration is about the NPU"),
        (("--verify-length", "5"), 2, "--verify-length is about the NPU"),
        (("--max-ram", "4"), 2, "--max-ram is about the NPU"),
        (("--soc", "x-elite", "--max-ram", "nan"), 2, "max_ram is nan"),
        (("--soc", "x-elite", "--max-ram", "inf"), 2, "max_ram is inf"),
        (("--soc", "888", "--lora-rank", "4"), 2, "leave out --soc 888, or --lora-rank"),
        (("--soc", "888", "--soc", "x-elite"), 2, "export for each of them apart"),
        (("--soc", "888", "--htp-precision", "w4a16"), 2, "needs Hexagon v73"),
        (("--soc", "x-elite", "--kv-bits", "8", "--htp-precision", "fp16"), 2, "KV bits"),
        (("--soc", "8-gen-1", "--share-weights"), 2, "no source claims that Snapdragon 8 Gen 1"),
        (("--soc", "x-elite", "--one-binary"), 2, "add another --soc"),
        (
            ("--soc", "x-elite", "--soc", "8-elite", "--one-binary", "--share-weights"),
            2,
            "leave out --share-weights or --one-binary",
        ),
        (("--soc", "x-elite", "--exporter", "optimum"), 2, "not built by our own builder"),
        (("--soc", "x-elite", "--max-ram", "0.01"), 1, "10.0 MB are available"),
        (("--soc", "x-elite", "--calibration", "missing.jsonl"), 1, "missing.jsonl"),
    ],
)
def test_what_cannot_be_made_is_one_line_before_any_work(
    checkpoints, tmp_path, nothing_made, extra, code, words
):
    assert words in error_of(export(checkpoints, tmp_path / "bundle", *extra), code)
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_nothing_would_be_calibrated_on_are_refused(
    checkpoints, tmp_path, nothing_made
):
    """fp16 has no ranges, and the file was left unread without a word."""
    path = tmp_path / "mine.txt"
    path.write_text("the small drafter proposes")
    extra = ("--soc", "x-elite", "--htp-precision", "fp16", "--calibration", str(path))
    line = error_of(export(checkpoints, tmp_path / "bundle", *extra), 2)
    assert line.endswith("fp16 is not calibrated: leave out --calibration")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no prompt"),
        (b'{"prompt": "\xff\xfe"}\n', "UTF-8"),
        (json.dumps({"prompt": "word " * 300}).encode(), "more than the context of 32"),
    ],
)
def test_a_calibration_file_that_cannot_be_used_is_one_line_before_any_work(
    checkpoints, tmp_path, nothing_made, content, words
):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    extra = ("--soc", "x-elite", "--calibration", str(path))
    assert words in error_of(export(checkpoints, tmp_path / "out" / "bundle", *extra), 1)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["mine.jsonl"]


def test_a_cache_that_no_chip_can_map_is_one_line_before_any_work(tmp_path, nothing_made):
    root = tmp_path / "checkpoints"
    for role in ("drafter", "target"):
        write_checkpoint(
            root / role,
            vocab_size=280,
            num_hidden_layers=2,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=2**21,
        )
    long = ("--context-length", "2097152", "--htp-context-length", "2000000")
    extra = ("--soc", "x-elite", *long)
    line = error_of(export(root, tmp_path / "bundle", *extra), 2)
    assert "a cache of 2,000,000 tokens of drafter takes" in line
    assert "--htp-context-length" in line


def test_what_may_disappoint_is_said_before_any_work(checkpoints, tmp_path, monkeypatch, caplog):
    """A cache shorter than asked for, one of 16 bits, and calibration on a few words."""
    monkeypatch.setattr(export_module, "export_model", lambda *_: 1 / 0)
    text = tmp_path / "mine.txt"
    text.write_text("the small drafter proposes")
    long = ("--context-length", "4096", "--htp-context-length", "2048", "--kv-bits", "16")
    extra = ("--soc", "x-elite", *long, "--calibration", str(text))
    result = export(checkpoints, tmp_path / "bundle", *extra)
    assert isinstance(result.exception, ZeroDivisionError), result.output
    limit = json.loads((checkpoints / "drafter/config.json").read_text())["max_position_embeddings"]
    words = (
        f"drafter is for {limit} tokens at most: its cache on the NPU has {limit} slots, not 2048",
        "drafter gets a cache of 16 bits, twice the memory of 8",
        "drafter is calibrated on 1 prompts of ",
    )
    for line in words:
        assert sum(line in message for message in caplog.messages) == 1, line
    caplog.clear()
    export(checkpoints, tmp_path / "bundle", "--soc", "x-elite")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(("chip", "rank"), [("888", 0), ("x-elite", DEFAULT_RANK)])
def test_a_drafter_learns_by_default_only_where_every_chip_can(
    checkpoints, tmp_path, monkeypatch, caplog, chip, rank
):
    """LoRA inputs were on by default for v68 too, and every export for it was refused."""
    ranks = []

    def stop(model, *_):
        ranks.append(model.request.lora_rank)
        raise ConfigError("seen enough")

    monkeypatch.setattr(export_module, "export_model", stop)
    export(checkpoints, tmp_path / "bundle", "--soc", chip)
    assert ranks == [rank]
    said = [line for line in caplog.messages if line.startswith("the drafter will not learn")]
    assert [line.endswith("claims for Snapdragon 888") for line in said] == [True] * (not rank)


def test_adapters_are_refused_on_a_chip_that_computes_nothing_in_fp16(checkpoints):
    """v68 has integers only, and the branch of an adapter stays in floats."""
    checkpoint = open_checkpoint(checkpoints / "drafter")
    request = HtpRequest(
        chips=(find_chip("888"),),
        options=HtpOptions(soc=("888",)),
    )
    model = HtpModel(
        name="it",
        request=request,
        checkpoint=checkpoint,
        tokenizer=checkpoint.tokenizer(),
        max_context_length=64,
        lora_rank=2,
        has_hidden_states=False,
    )
    with pytest.raises(ConfigError, match="no source claims for Snapdragon 888: leave out --soc"):
        check_htp(model, None)
    check_htp(dataclasses.replace(model, lora_rank=0), None)


def seen_enough(*_):
    raise ConfigError("seen enough")


def test_too_little_disk_is_one_line_before_any_work(
    checkpoints, tmp_path, nothing_made, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    line = error_of(export(checkpoints, tmp_path / "bundle", "--soc", "x-elite"), 1)
    assert "0.0 MB free" in line


def test_files_of_an_interrupted_export_count_as_room(checkpoints, tmp_path, monkeypatch):
    """An export that had filled most of a disk could not be taken up again."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(export_module, "_model", seen_enough)
    made = tmp_path / "bundle.partial" / "targets" / "target" / "htp" / "part_0"
    made.mkdir(parents=True)
    with (made / "weights.data").open("wb") as file:
        file.truncate(50_000_000)
    line = error_of(export(checkpoints, tmp_path / "bundle", "--soc", "x-elite"), 2)
    assert "seen enough" in line


def test_an_existing_output_is_kept(checkpoints, tmp_path, nothing_made):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "mine").write_text("")
    line = error_of(export(checkpoints, tmp_path / "bundle", "--soc", "x-elite"), 1)
    assert "is not a bundle: choose another --output" in line


def test_without_qnn_the_line_says_how_to_get_it(checkpoints, tmp_path, nothing_made, monkeypatch):
    from omnidraft_npu.qnn import versions

    real = versions.installed_version
    monkeypatch.setattr(
        versions, "installed_version", lambda name: None if name.endswith("qnn") else real(name)
    )
    line = error_of(export(checkpoints, tmp_path / "bundle", "--soc", "x-elite"), 4)
    assert "pip install 'onnxruntime-qnn" in line
