"""A model over a context's limit goes into parts: said, built, compiled, recorded."""

import dataclasses

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.quantize import htp_stage, preflight
from omnidraft_npu.quantize.calibration.htp_quantization import quantize_htp_decoder
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions
from omnidraft_npu.quantize.htp_parts import build_parts
from omnidraft_npu.quantize.recipes import RECIPES
from omnidraft_npu.runtime.static_lm import StaticModel
from omnidraft_npu.text.tokenizer import Tokenizer

pytest.importorskip("onnxruntime_qnn")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", vocab_size=280)


@pytest.fixture
def small_chip(monkeypatch):
    """A chip whose context has room for 200 kB, so that the tiny model needs two."""
    monkeypatch.setattr(preflight, "_FULL_SHARE", 200e3 / (3584 * 2**20))


def export(checkpoint, output, *extra):
    arguments = ["--drafter", str(checkpoint), "--target", str(checkpoint), "-o", str(output)]
    lengths = ["--context-length", "64", "--htp-context-length", "16", "--precision", "fp32"]
    return CliRunner().invoke(cli, ["export", *arguments, *lengths, "--soc", "x-elite", *extra])


def test_the_bundle_has_graphs_and_binaries_of_every_part(
    checkpoint, tmp_path, monkeypatch, caplog, small_chip
):
    def compile_nothing(graphs, folder, chips, **_):
        made = {length: folder / f"length_{length}_ctx.onnx" for length in graphs}
        for path in made.values():
            path.write_bytes(b"binary")
        return made

    monkeypatch.setattr(htp_stage, "compile_graphs", compile_nothing)
    result = export(checkpoint, tmp_path / "bundle", "--htp-precision", "fp16")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "more than a context of the NPU holds: it goes into 2 parts" in caplog.text
    htp = open_bundle(tmp_path / "bundle").manifest.drafter.htp
    assert [part.num_layers for part in htp.parts] == [2, 1]
    assert htp.parts[1].graphs["8"] == "drafter/htp/part_1/length_8.onnx"
    assert htp.parts[1].compiled == {
        "x-elite": {n: f"drafter/htp/part_1/x-elite/length_{n}_ctx.onnx" for n in ("1", "8", "16")}
    }
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "bundle")]).stdout
    assert "in 2 parts of 2 and 1 layers" in shown


def test_a_recipe_that_cannot_be_made_in_parts_is_one_line(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_FULL_SHARE", 100e3 / (3584 * 2**20))
    result = export(checkpoint, tmp_path / "bundle", "--htp-precision", "w8a16")
    assert result.exit_code == 2
    assert "--htp-precision w4a16-nbits" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_parts_in_4_bits_answer_as_the_whole_in_4_bits_does(checkpoint, tmp_path):
    opened = open_checkpoint(checkpoint)
    files = opened.tokenizer()
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    options = HtpGraphOptions(lengths=(1, 8), context_length=16)
    common = (opened.config, opened.tensor, tokenizer)
    recipe = RECIPES["w4a16-nbits"]
    for name in ("whole", "split"):
        (tmp_path / name).mkdir()
    whole = quantize_htp_decoder(*common, tmp_path / "whole", options, recipe).graphs
    layers = (range(1), range(1, opened.config.num_layers))
    parts = build_parts(*common, tmp_path / "split", options, recipe, layers)
    assert sorted(p.name for p in (tmp_path / "split").iterdir()) == ["part_0", "part_1"]

    def score(graphs):
        model = StaticModel.open(
            graphs,
            lambda path: ort.InferenceSession(path, providers=["CPUExecutionProvider"]),
            provider="CPU",
            vocab_size=280,
        )
        return model.begin().score([3, 7, 9, 4, 5])

    np.testing.assert_allclose(score(parts), score(whole), rtol=1e-3, atol=1e-3)


def test_an_export_that_loses_too_much_says_so_and_is_marked(
    checkpoint, tmp_path, monkeypatch, caplog
):
    """4 bits of random weights: whatever the recipe's bound, it is set below what they lose."""
    recipe = dataclasses.replace(RECIPES["w4a16-nbits"], max_loss=-1.0)
    monkeypatch.setitem(RECIPES, "w4a16-nbits", recipe)
    monkeypatch.setattr(htp_stage, "compile_graphs", lambda *_, **__: {})
    result = export(checkpoint, tmp_path / "bundle", "--htp-precision", "w4a16-nbits")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "of perplexity in w4a16-nbits, more than the" in caplog.text
    htp = open_bundle(tmp_path / "bundle").manifest.drafter.htp
    assert htp.is_accurate is False
    assert htp.report["perplexity"] > 0
    assert "built-in" in htp.calibration
