"""The training graph: torch's loss and gradients, computed by onnxruntime alone."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from graph_runner import GraphRunner
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.errors import ExportError
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.quantize.training import graph
from omnidraft_npu.quantize.training.graph import (
    TrainingGraphOptions,
    build_training_graph,
    example_feeds,
)
from omnidraft_npu.quantize.training.losses import weighted_loss

OPTIONS = TrainingGraphOptions(lora_rank=3, batch=2, length=20, num_top=6)
IN_CI = ("llama", "gemma3_text")


def checkpoint_of(architecture, folder):
    tiny_model(architecture).save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.mark.parametrize(
    "architecture",
    [a if a in IN_CI else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES],
)
def test_gradients_are_those_of_torch(tmp_path, architecture):
    checkpoint = checkpoint_of(architecture, tmp_path / "source")
    path = tmp_path / "step" / "lora_step.onnx"
    assert build_training_graph(checkpoint.config, checkpoint.tensor, path, OPTIONS) < 1e-4
    _check_loss_falls_along_the_gradient(path, checkpoint.config)


def _check_loss_falls_along_the_gradient(path, config):
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = example_feeds(config, OPTIONS)
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, feeds), strict=True))
    gradients = {name: found[f"grad.{name}"] for name in feeds if name.startswith("lora.")}
    square = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values())
    step = 1e-3 / np.sqrt(square)
    moved = {n: v - step * gradients[n] if n in gradients else v for n, v in feeds.items()}
    moved = {n: v.astype(feeds[n].dtype) for n, v in moved.items()}
    loss = session.run(["loss"], moved)[0]
    assert loss - found["loss"] == pytest.approx(-step * square, rel=0.2)


def test_the_decoder_that_is_trained_is_the_decoder_that_drafts(tmp_path):
    """The states of the traced decoder against the drafter's own graph, adapter included."""
    checkpoint = checkpoint_of("gemma3_text", tmp_path / "source")
    config = checkpoint.config
    options = CpuGraphOptions(precision="fp32", context_length=32, lora_rank=3)
    path = build_cpu_decoder(config, checkpoint.tensor, tmp_path / "graph", options)
    feeds = example_feeds(config, OPTIONS)
    lora = {name: value for name, value in feeds.items() if name.startswith("lora.")}
    runner = GraphRunner(path, capacity=32)
    runner.lora = lora
    expected = runner.run(feeds["pieces"][0].tolist())
    weights = {name: torch.from_numpy(checkpoint.tensor(name)) for name in config.tensor_shapes()}
    decoder = graph.LoraDecoder(config, OPTIONS.length)
    tensors = {name: torch.from_numpy(value) for name, value in lora.items()}
    states = decoder.states(weights, tensors, torch.from_numpy(feeds["pieces"]))
    found = decoder.logits(weights, states)[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.ptp(expected))


def test_a_graph_that_differs_from_torch_is_refused(tmp_path, monkeypatch):
    checkpoint = checkpoint_of("llama", tmp_path / "source")
    monkeypatch.setattr(graph, "_WORST_ERROR", 0.0)
    with pytest.raises(ExportError, match="gradients differ"):
        build_training_graph(checkpoint.config, checkpoint.tensor, tmp_path / "a.onnx", OPTIONS)


def one_position(logits, ids, probs, forward, reverse):
    tensors = (torch.tensor([[v]], dtype=torch.float64) for v in (logits, probs))
    logits, probs = tensors
    weights = (torch.tensor([[w]], dtype=torch.float64) for w in (forward, reverse))
    return float(weighted_loss(logits, torch.tensor([[ids]]), probs, *weights))


LOGITS = [0.3, -1.0, 2.0, 0.5]
Q = np.exp(LOGITS) / np.exp(LOGITS).sum()


def test_the_forward_divergence_counts_what_a_law_leaves_open_as_one_group():
    expected = -(0.5 * np.log(Q[2]) + 0.3 * np.log(Q[0]) + 0.2 * np.log(Q[1] + Q[3]))
    assert one_position(LOGITS, [2, 0], [0.5, 0.3], 1.0, 0.0) == pytest.approx(expected)


def test_of_a_single_piece_the_forward_divergence_is_its_likelihood():
    found = one_position(LOGITS, [1, 0], [1.0, 0.0], 0.2, 0.0)
    assert found == pytest.approx(-np.log(Q[1]))


def test_the_reverse_divergence_is_taken_over_the_named_pieces_alone():
    q = Q[[2, 0]] / Q[[2, 0]].sum()
    p = np.array([0.5, 0.3]) / 0.8
    found = one_position(LOGITS, [2, 0], [0.5, 0.3], 0.0, 1.0)
    assert found == pytest.approx((q * np.log(q / p)).sum())


def test_positions_without_weight_teach_nothing():
    assert one_position(LOGITS, [2, 0], [0.5, 0.3], 0.0, 0.0) == 0.0
