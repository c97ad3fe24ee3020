"""A drafter that learns: what `export` writes of it, and when it refuses to."""

import dataclasses
import json
from importlib.util import find_spec

import onnxruntime as ort
import pytest
from click.testing import CliRunner
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.errors import BundleError, ConfigError
from omnidraft_npu.manifest import Manifest, ModelEntry
from omnidraft_npu.manifest_checks import check_manifest, required_files
from omnidraft_npu.quantize.training import parity
from omnidraft_npu.quantize.training_stage import TrainingShape


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(root / "model", vocab_size=280)
    return root / "model"


def export(checkpoint, output, *extra, precision="int8"):
    arguments = ["--drafter", str(checkpoint), "--target", str(checkpoint), "-o", str(output)]
    options = ["--precision", precision, "--context-length", "64"]
    return CliRunner().invoke(cli, ["export", *arguments, *options, *extra])


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory):
    """Exported where torch is not installed, with nothing said of learning."""
    output = tmp_path_factory.mktemp("bundle") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "find_spec", lambda name: None)
        result = export(checkpoint, output)
    assert result.exit_code == 0, result.output
    return open_bundle(output, verify=True)


def test_a_drafter_learns_unless_told_otherwise_and_without_torch(bundle):
    drafter = bundle.manifest.drafter
    training, graph = drafter.training, drafter.graphs["cpu"]
    assert (training.lora_rank, graph.lora_rank, graph.has_hidden_states) == (16, 16, True)
    assert (training.batch, training.length, training.num_top) == (8, 64, 32)
    assert training.gradient_error is None
    session = ort.InferenceSession(bundle.path(training.path))
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert shapes["law_ids"] == [8, 64, 32]
    decoder = ort.InferenceSession(bundle.path(graph.path))
    lora = {v.name: v.shape for v in decoder.get_inputs() if v.name.startswith("lora.")}
    assert lora
    assert {n: s for n, s in shapes.items() if n.startswith("lora.")} == lora


def test_a_target_does_not_learn(bundle):
    target = bundle.target(None)
    assert target.training is None
    assert target.graphs["cpu"].lora_rank == 0


def test_a_training_graph_that_is_gone_is_missed(bundle):
    wanted = dict(required_files(bundle.manifest))
    assert bundle.manifest.drafter.training.path in wanted


def test_with_rank_0_there_is_nothing_to_learn_with(checkpoint, tmp_path):
    assert export(checkpoint, tmp_path / "bundle", "--lora-rank", "0").exit_code == 0
    drafter = open_bundle(tmp_path / "bundle").manifest.drafter
    assert drafter.training is None
    assert drafter.graphs["cpu"].lora_rank == 0
    assert not drafter.graphs["cpu"].has_hidden_states
    assert not (tmp_path / "bundle/drafter/cpu/lora_step.onnx").exists()


def test_a_smaller_update_for_a_weak_device(checkpoint, tmp_path):
    options = ("--lora-rank", "2", "--training-shape", "2x32")
    assert export(checkpoint, tmp_path / "bundle", *options, precision="int4").exit_code == 0
    opened = open_bundle(tmp_path / "bundle")
    training = opened.manifest.drafter.training
    assert (training.lora_rank, training.batch, training.length) == (2, 2, 32)
    if find_spec("torch"):  # without it gradients are tried, not measured
        assert training.gradient_error < 1e-4
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "bundle")])
    assert "learns: LoRA of rank 2, 2 responses of at most 32 pieces" in shown.stdout


def test_an_interrupted_check_keeps_the_drafter(checkpoint, tmp_path, monkeypatch):
    """And what was there of the training graph goes; the next run makes that alone."""

    def interrupted(*_):
        raise KeyboardInterrupt

    options = ("--lora-rank", "2")
    with monkeypatch.context() as patch:
        patch.setattr(parity, "check_training_graph", interrupted)
        assert export(checkpoint, tmp_path / "bundle", *options).exit_code != 0
    folder = tmp_path / "bundle.partial/drafter/cpu"
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "model.onnx.data"}
    again = export(checkpoint, tmp_path / "bundle", *options)
    assert again.exit_code == 0, again.output
    assert "training graph of model: 6 done" in again.stderr
    assert "drafter model:" not in again.stderr
    assert open_bundle(tmp_path / "bundle", verify=True).manifest.drafter.training is not None


@pytest.mark.parametrize("shape", ["8", "0x256", "8x1", "8 x 256", "-1x5", "axb"])
def test_a_shape_that_cannot_be_is_one_line(shape):
    with pytest.raises(ConfigError, match="use --training-shape 8x256"):
        TrainingShape.parse(shape)


def test_a_negative_rank_is_one_line(checkpoint, tmp_path):
    result = export(checkpoint, tmp_path / "bundle", "--lora-rank", "-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: lora_rank is -1")


def test_a_drafter_that_is_not_built_here_cannot_learn(checkpoint, tmp_path):
    source = tmp_path / "foreign"
    source.mkdir()
    (source / "genai_config.json").write_text("{}", encoding="utf-8")
    result = CliRunner().invoke(
        cli, ["export", "--drafter", str(source), "--target", str(checkpoint), "-o", "bundle"]
    )
    assert result.exit_code == 2
    assert "foreign is not built by our own builder" in result.stderr
    assert "--lora-rank 0" in result.stderr


def test_manifests_from_before_there_was_learning_still_load(bundle):
    document = json.loads(json.dumps(bundle.manifest.to_json()))
    for model in (document["drafter"], *document["targets"].values()):
        del model["training"]
    assert Manifest.from_json(document).drafter.training is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch", 0, "drafter.training.batch is 0, must be an integer >= 1"),
        ("path", "../lora_step.onnx", "a path outside the bundle"),
        ("lora_rank", 8, "that of graphs.cpu is 16"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(bundle, field, value, message):
    drafter: ModelEntry = bundle.manifest.drafter
    training = dataclasses.replace(drafter.training, **{field: value})
    changed = dataclasses.replace(
        bundle.manifest, drafter=dataclasses.replace(drafter, training=training)
    )
    with pytest.raises(BundleError, match=message):
        check_manifest(Manifest.from_json(changed.to_json()))
