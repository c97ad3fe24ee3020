"""The benchmark against onnxruntime-genai shows why its other builder failed, and runs again."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "decode_vs_genai.py"


class Checkpoint:
    class config:  # noqa: N801
        num_logits = 3


@pytest.fixture
def build(monkeypatch):
    """`build` of the script with models that hold nothing."""
    from omnidraft_npu.quantize import decoder_cpu
    from omnidraft_npu.quantize.checkpoints import open_checkpoint

    monkeypatch.setattr(open_checkpoint, "open_checkpoint", lambda _: Checkpoint)
    monkeypatch.setattr(Checkpoint, "tensor", None, raising=False)
    monkeypatch.setattr(decoder_cpu, "build_cpu_decoder", lambda *_: None)
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(
        script["build"].__globals__, "write_hugging_face", lambda _, folder: folder.mkdir()
    )
    return script["build"]


def python_that(tmp_path, body):
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_builder_that_failed_is_shown_and_can_be_run_again(build, tmp_path, capfd):
    """`source-int8` existed after a failure, and the builder's own error was hidden."""
    work = tmp_path / "work"
    work.mkdir()
    make = "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).mkdir()"
    failing = python_that(tmp_path, f"{make}\nsys.exit('no such operator')")
    for _ in range(2):
        with pytest.raises(SystemExit, match="ended with 1"):
            build(tmp_path, work, "int8", failing)
        assert "no such operator" in capfd.readouterr().err
    folders, _ = build(tmp_path, work, "int8", python_that(tmp_path, make))
    assert folders["genai"].is_dir()
    assert [path.name for path in work.iterdir()] == ["genai-int8"]
