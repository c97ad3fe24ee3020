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
from omnidraft_npu.quantize.recipes import RECIPES
from omnidraft_npu.runtime.static_lm import StaticModel
from omnidraft_npu.text.tokenizer import Tokenizer

pytest.importorskip("onnxruntime_qnn")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", vocab_size=280)


@pytest.fixture
def small_chip(monkeypatch):
    """A chip whose context has room for 110 kB, so that the tiny model needs two."""
    monkeypatch.setattr(preflight, "_FULL_SHARE", 110e3 / (3584 * 2**20))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Ten prompts: nothing is learned from them but that all works."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(f"{n} is a number" for n in range(10)))
    return path


def export(checkpoint, output, *extra):
    arguments = ["--drafter", str(checkpoint), "--target", str(checkpoint), "-o", str(output)]
    lengths = ["--context-length", "64", "--htp-context-length", "16", "--precision", "fp32"]
    return CliRunner().invoke(cli, ["export", *arguments, *lengths, "--soc", "x-elite", *extra])


def test_the_bundle_has_graphs_and_binaries_of_every_part(
    checkpoint, tmp_path, monkeypatch, caplog, small_chip, prompts
):
    def compile_nothing(graphs, folder, chips, **_):
        made = {length: folder / f"length_{length}_ctx.onnx" for length in graphs}
        for path in made.values():
            path.write_bytes(b"binary")
        return made

    monkeypatch.setattr(htp_stage, "compile_graphs", compile_nothing)
    extra = ("--htp-precision", "w8a16", "--calibration", str(prompts))
    result = export(checkpoint, tmp_path / "bundle", *extra)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "goes into 2 parts, each a context of its own" in caplog.text
    assert "model in w8a16: perplexity " in caplog.text
    htp = open_bundle(tmp_path / "bundle").manifest.drafter.htp
    assert htp.report["relative_error"] < 0.1
    assert htp.is_accurate is not None
    assert [part.num_layers for part in htp.parts] == [1, 2]
    assert htp.parts[1].graphs["8"] == "drafter/htp/part_1/length_8.onnx"
    assert htp.parts[1].compiled == {
        "x-elite": {n: f"drafter/htp/part_1/x-elite/length_{n}_ctx.onnx" for n in ("1", "8", "16")}
    }
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "bundle")]).stdout
    assert "in 2 parts of 1 and 2 layers" in shown


@pytest.mark.parametrize("name", ["w4a16-nbits", "w8a16", "integers"])
def test_parts_answer_and_report_as_the_whole_does(checkpoint, tmp_path, name, prompts):
    """A part is calibrated on what the floats before it give, so its encodings are the same."""
    opened = open_checkpoint(checkpoint)
    files = opened.tokenizer()
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    options = HtpGraphOptions(lengths=(1, 8), context_length=16)
    common = (opened.config, opened.tensor, tokenizer)
    integers = dataclasses.replace(RECIPES["w8a16"], has_float_residual=False)
    recipe = integers if name == "integers" else RECIPES[name]
    layers = (range(1), range(1, opened.config.num_layers))

    def make(folder, **parts):
        source = (*common, tmp_path / folder, options, recipe)
        return quantize_htp_decoder(*source, calibration=prompts, **parts)

    whole, parts = make("whole"), make("split", parts=layers)
    assert sorted(p.name for p in (tmp_path / "split").iterdir()) == ["part_0", "part_1"]
    assert parts.calibration == whole.calibration
    assert parts.comparison.to_report() == pytest.approx(
        whole.comparison.to_report(), rel=0.02, abs=1e-3
    )

    def score(graphs):
        model = StaticModel.open(
            graphs,
            lambda path: ort.InferenceSession(path, providers=["CPUExecutionProvider"]),
            provider="CPU",
            vocab_size=280,
        )
        return model.begin().score([3, 7, 9, 4, 5])

    found, expected = score(parts.parts), score(whole.graphs)
    assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)


def test_an_export_that_loses_too_much_says_so_and_is_marked(
    checkpoint, tmp_path, monkeypatch, caplog
):
    """4 bits of random weights: whatever the recipe's bound, it is set below what they err."""
    recipe = dataclasses.replace(RECIPES["w4a16-nbits"], max_error=0.001)
    monkeypatch.setitem(RECIPES, "w4a16-nbits", recipe)
    monkeypatch.setattr(htp_stage, "compile_graphs", lambda *_, **__: {})
    result = export(checkpoint, tmp_path / "bundle", "--htp-precision", "w4a16-nbits")
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "loses more in w4a16-nbits than is good" in caplog.text
    assert "the error of the logits is over 0.001" in caplog.text
    htp = open_bundle(tmp_path / "bundle").manifest.drafter.htp
    assert htp.is_accurate is False
    assert htp.report["perplexity"] > 0
    assert "built-in" in htp.calibration
