"""The training graph: torch's losses and gradients, computed by onnxruntime alone."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from graph_runner import GraphRunner
from tiny_checkpoints import write_checkpoint
from tiny_models import ARCHITECTURES
from training_graphs import tiny_training

from omnidraft_npu.acceptance_head import AcceptanceHead, head_shapes
from omnidraft_npu.errors import ConfigError, ExportError
from omnidraft_npu.lora import MODULES
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.quantize.training import (
    decoder_nodes,
    graph,
    loss_nodes,
    operators,
    parity,
)
from omnidraft_npu.quantize.training.graph import TrainingGraphOptions, build_training_graph
from omnidraft_npu.quantize.training.parity import (
    check_training_graph,
    example_feeds,
    stored_tensors,
)
from omnidraft_npu.quantize.training.reference import (
    acceptance_loss,
    reference_outputs,
    weighted_loss,
)
from omnidraft_npu.quantize.training.reference_decoder import LoraDecoder

IN_CI = ("llama-fp32", "llama-int4", "qwen2-int8", "gemma3_text-int8")
CASES = [(a, p) for a in ARCHITECTURES for p in ("fp32", "int8", "int4")]


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(parity, "find_spec", lambda name: None)


def outputs(path, feeds):
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def assert_is_torch(made, feeds):
    weights = stored_tensors(made.path.with_name("model.onnx"), made.config)
    expected = reference_outputs(made.config, weights, feeds)
    found = outputs(made.path, feeds)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4 * np.abs(value).max(), rtol=0)


@pytest.mark.parametrize(
    "case",
    [c if "-".join(c) in IN_CI else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
    ids="-".join,
)
def test_every_output_is_torchs_own(tmp_path, case):
    """On float and on dequantised weights; the graph's real shapes, and those of the check."""
    made = tiny_training(tmp_path, *case)
    assert_is_torch(made, example_feeds(made.config, made.options))
    assert check_training_graph(made.path, made.config, made.options) < 1e-4


def test_logits_in_chunks_give_the_same(tmp_path, monkeypatch):
    whole = tiny_training(tmp_path)
    feeds = example_feeds(whole.config, whole.options)
    expected = outputs(whole.path, feeds)
    assert graph.num_chunks(whole.options, whole.config.num_logits) == 1
    monkeypatch.setattr(graph, "_CHUNK_BYTES", 4 * whole.config.num_logits * 9)
    assert graph.num_chunks(whole.options, whole.config.num_logits) == 5
    found = outputs(build_training_graph(whole.config, tmp_path, whole.options), feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5 * np.abs(value).max(), rtol=0)


def test_rows_are_cut_at_most_into_single_pieces():
    options = TrainingGraphOptions(lora_rank=1, batch=3, length=7)
    assert graph.num_chunks(options, 1 << 40) == 7


def test_the_weights_are_the_drafters_own_bytes(tmp_path):
    """No file of its own, and no large tensor inside."""
    made = tiny_training(tmp_path, "qwen3", "int8")
    decoder = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer
    places = {t.name: {e.key: e.value for e in t.external_data} for t in decoder}
    step = onnx.load(made.path, load_external_data=False).graph.initializer
    shared = [tensor for tensor in step if tensor.external_data]
    assert sum("proj" in t.name or "gate_up" in t.name for t in shared) > 0
    for tensor in shared:
        assert {e.key: e.value for e in tensor.external_data} == places[tensor.name]
    assert all(len(tensor.raw_data) <= 1024 for tensor in step)
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"model.onnx", "model.onnx.data", "lora_step.onnx"}


def test_the_decoder_that_is_trained_is_the_decoder_that_drafts(tmp_path):
    """What the reference says against the drafter's own graph, adapter included."""
    made = tiny_training(tmp_path, "gemma3_text")
    feeds = example_feeds(made.config, made.options)
    lora = {name: value for name, value in feeds.items() if name.startswith("lora.")}
    runner = GraphRunner(made.path.with_name("model.onnx"), capacity=32)
    runner.lora = lora
    expected = runner.run(feeds["pieces"][0].tolist())
    weights = stored_tensors(made.path.with_name("model.onnx"), made.config)
    weights = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    decoder = LoraDecoder(made.config, made.options.length)
    tensors = {name: torch.from_numpy(value) for name, value in lora.items()}
    states = decoder.states(weights, tensors, torch.from_numpy(feeds["pieces"]))
    found = decoder.logits(weights, states)[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.ptp(expected))
    np.testing.assert_allclose(states[0].numpy(), runner.hidden_states, atol=1e-4)


def test_the_heads_loss_moves_the_adapter_only_where_they_are_trained_jointly(tmp_path):
    made = tiny_training(tmp_path)
    feeds = example_feeds(made.config, made.options)
    apart = outputs(made.path, feeds | {"joint": np.array(0, np.float32)})
    joint = outputs(made.path, feeds)
    without = outputs(made.path, feeds | {"head_weight": np.zeros_like(feeds["head_weight"])})
    name = "grad.lora.layers.1.v_proj.A"
    np.testing.assert_array_equal(apart[name], without[name])
    assert np.abs(joint[name] - apart[name]).max() > 1e-3 * np.abs(apart[name]).max()
    np.testing.assert_array_equal(joint["grad.head.in.weight"], apart["grad.head.in.weight"])
    assert without["head_loss"] == 0
    assert not without["grad.head.in.weight"].any()


def test_positions_without_weight_teach_nothing(tmp_path):
    made = tiny_training(tmp_path)
    feeds = example_feeds(made.config, made.options)
    weights = ("forward_weight", "reverse_weight", "overlap_weight", "head_weight")
    found = outputs(made.path, feeds | {name: np.zeros_like(feeds[name]) for name in weights})
    assert found["loss"] == 0
    assert not any(np.any(value) for value in found.values())


def test_the_overlaps_gradient_is_torchs_where_laws_are_near_the_drafter(tmp_path):
    """Of random laws it is next to nothing beside the others': the drafter hardly has them."""
    made = tiny_training(tmp_path)
    feeds = example_feeds(made.config, made.options)
    runner = GraphRunner(made.path.with_name("model.onnx"), capacity=32)
    runner.lora = {name: value for name, value in feeds.items() if name.startswith("lora.")}
    rng = np.random.default_rng(0)
    for row, pieces in enumerate(feeds["pieces"].tolist()):
        runner.length = 0
        logits = runner.run(pieces)
        law = np.exp(logits - logits.max(-1, keepdims=True))
        ids = np.argsort(-law, axis=-1)[:, : made.options.num_top]
        drafted = np.take_along_axis(law / law.sum(-1, keepdims=True), ids, -1)
        feeds["law_ids"][row] = ids
        feeds["law_probs"][row] = drafted * np.exp(rng.normal(scale=0.5, size=drafted.shape))
    for name in ("forward_weight", "reverse_weight", "head_weight"):
        feeds[name] = np.zeros_like(feeds[name])
    assert_is_torch(made, feeds)


def test_only_adapted_modules_are_inputs(tmp_path):
    made = tiny_training(tmp_path, lora_modules=("q_proj", "down_proj"))
    feeds = example_feeds(made.config, made.options)
    assert sum(name.startswith("lora.") for name in feeds) == 2 * 2 * made.config.num_layers
    assert_is_torch(made, feeds)


def test_the_head_is_the_one_that_ends_drafts(tmp_path):
    """The graph's head loss from the probabilities that `AcceptanceHead` gives."""
    made = tiny_training(tmp_path)
    feeds = example_feeds(made.config, made.options)
    feeds["head_weight"] = np.zeros_like(feeds["head_weight"])
    feeds["head_weight"][0, 4] = 1
    runner = GraphRunner(made.path.with_name("model.onnx"), capacity=32)
    runner.lora = {name: value for name, value in feeds.items() if name.startswith("lora.")}
    logits = runner.run(feeds["pieces"][0, :5].tolist())[-1]
    law = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    label = np.minimum(law[feeds["law_ids"][0, 4]], feeds["law_probs"][0, 4]).sum()
    head = AcceptanceHead.from_tensors(feeds)
    chance = 1 / (1 + np.exp(-head.logits(runner.hidden_states[-1])))
    expected = -(label * np.log(chance) + 6 * (1 - label) * np.log(1 - chance))
    assert outputs(made.path, feeds)["head_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_torch_right_gradients_raise_no_alarm(tmp_path, architecture):
    for precision in ("fp32", "int8", "int4"):
        folder = tmp_path / precision
        made = tiny_training(folder, architecture, precision)
        assert check_training_graph(made.path, made.config, made.options) is None


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("head_dim", [100, 24])
def test_heads_need_not_be_multiples_of_16(tmp_path, architecture, head_dim):
    """The rotary tables that it shares with the CPU graph have columns for padding."""
    made = tiny_training(tmp_path, architecture, model={"head_dim": head_dim})
    check_training_graph(made.path, made.config, made.options)


LEARNED = [
    *(f"lora.layers.1.{module}.{side}" for module in MODULES for side in "AB"),
    *head_shapes(1),
]
WRONG = {
    "missing": np.zeros_like,
    "turned": np.negative,
    "too large": lambda value: value * np.float32(1.1),
    "not a number": lambda value: value * np.float32(np.nan),
    "in another order": lambda value: np.roll(value, 1, axis=0) if len(value) > 1 else -value,
}


@pytest.fixture(scope="module")
def small_graph(tmp_path_factory):
    """The graph that is checked where there is no torch, and what it is fed."""
    made = tiny_training(tmp_path_factory.mktemp("tiny"), "llama", "int8", length=12)
    run = parity._SmallGraph(made.path, made.config, made.options)
    yield run, example_feeds(made.config, made.options)
    run.close()


@pytest.mark.parametrize("wrong", WRONG)
def test_without_torch_a_wrong_gradient_of_any_one_tensor_is_found(small_graph, wrong):
    run, feeds = small_graph
    for name in LEARNED:
        broken = f"grad.{name}"

        def mistaken(feeds, broken=broken):
            outputs = run(feeds)
            return outputs | {broken: WRONG[wrong](outputs[broken])}

        with pytest.raises(ExportError, match=r"gradients are wrong.*--lora-rank 0"):
            parity._check_slopes(mistaken, feeds, mistaken(feeds), lambda _: None)


@pytest.mark.slow
def test_without_torch_one_wrong_tensor_of_a_deep_drafter_is_found(tmp_path):
    """Along its many tensors at once the losses bend, which must not be taken for a mistake."""
    source = write_checkpoint(tmp_path / "source", vocab_size=280, num_hidden_layers=30)
    checkpoint = open_checkpoint(source)
    options = CpuGraphOptions(context_length=64, lora_rank=16, has_hidden_states=True)
    build_cpu_decoder(checkpoint.config, checkpoint.tensor, tmp_path, options)
    shapes = TrainingGraphOptions(lora_rank=16, batch=2, length=12)
    path = build_training_graph(checkpoint.config, tmp_path, shapes)
    run = parity._SmallGraph(path, checkpoint.config, shapes)
    feeds = example_feeds(checkpoint.config, shapes)
    parity._check_slopes(run, feeds, run(feeds), lambda _: None)

    def mistaken(feeds):
        outputs = run(feeds)
        name = "grad.lora.layers.17.up_proj.B"
        return outputs | {name: outputs[name] * np.float32(1.1)}

    with pytest.raises(ExportError, match="gradients are wrong"):
        parity._check_slopes(mistaken, feeds, mistaken(feeds), lambda _: None)
    run.close()


@pytest.mark.usefixtures("without_torch")
def test_without_torch_the_check_takes_ten_runs_of_a_small_graph(tmp_path, monkeypatch):
    """Of a drafter as large as the built-in one, each takes a fifth of a second."""
    run, shapes, steps = parity._SmallGraph.__call__, [], []

    def counted(self, feeds):
        shapes.append(feeds["pieces"].shape)
        return run(self, feeds)

    monkeypatch.setattr(parity._SmallGraph, "__call__", counted)
    made = tiny_training(tmp_path)
    check_training_graph(made.path, made.config, made.options, steps.append)
    assert shapes == [(2, 12)] * 10
    assert steps == list(range(1, parity.NUM_STEPS + 1))


def _turned(ops, loss, slope):
    return loss, ops("Neg", slope)


MISTAKES = {
    "the norm forgets what lies along it": (
        operators.Operators,
        "norm",
        lambda self, x, weight, epsilon: (
            self("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon),
            lambda gradient: self("Mul", gradient, weight),
        ),
    ),
    "queries are not turned back": (
        decoder_nodes.TrainedDecoder,
        "_rotate",
        lambda self, x, cos, sin: self._ops(
            "RotaryEmbedding",
            x,
            self._ops.integers(0),
            cos,
            cos.replace("cos", "sin"),
            domain="com.microsoft",
        ),
    ),
    "the reverse slope points the other way": (
        loss_nodes._Named,
        "reverse",
        lambda self, of=loss_nodes._Named.reverse: _turned(self._ops, *of(self)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("has_torch", [True, False])
def test_a_wrong_gradient_is_refused(tmp_path, monkeypatch, request, mistake, has_torch):
    if not has_torch:
        request.getfixturevalue("without_torch")
    monkeypatch.setattr(*MISTAKES[mistake])
    made = tiny_training(tmp_path)
    with pytest.raises(ExportError, match=r"gradient.*--lora-rank 0"):
        check_training_graph(made.path, made.config, made.options)
    assert not list(tmp_path.glob(".small*"))


@pytest.mark.parametrize("field", ["lora_rank", "batch", "length", "num_top"])
def test_shapes_that_cannot_be_are_refused(field):
    with pytest.raises(ConfigError, match=field):
        TrainingGraphOptions(**{"lora_rank": 1} | {field: 0})


def test_without_a_cpu_graph_there_is_none_to_train(tmp_path):
    made = tiny_training(tmp_path)
    with pytest.raises(ExportError, match=r"cannot read .*model\.onnx"):
        build_training_graph(made.config, tmp_path / "elsewhere", made.options)


def one_position(logits, ids, probs, forward, reverse, overlap=0.0):
    tensors = (torch.tensor([[v]], dtype=torch.float64) for v in (logits, probs))
    logits, probs = tensors
    weights = (torch.tensor([[w]], dtype=torch.float64) for w in (forward, reverse, overlap))
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


def test_the_reverse_divergence_holds_where_a_sure_drafter_expects_none_of_the_pieces():
    named = one_position([0.3, 40.0, 2.0, 0.5], [2, 0], [0.5, 0.3], 0.0, 1.0)
    assert named == pytest.approx(one_position(LOGITS, [2, 0], [0.5, 0.3], 0.0, 1.0))


def test_the_overlap_loss_is_the_chance_that_a_draft_is_rejected():
    expected = 1 - (min(Q[2], 0.5) + min(Q[0], 0.3))
    assert Q[2] > 0.5
    assert Q[0] < 0.3
    assert one_position(LOGITS, [2, 0], [0.5, 0.3], 0.0, 0.0, 1.0) == pytest.approx(expected)


def test_the_mean_is_over_the_weights_of_all_losses():
    law = (LOGITS, [2, 0], [0.5, 0.3])
    alone = [one_position(*law, *weights) for weights in np.eye(3)]
    found = one_position(*law, 1.0, 2.0, 3.0)
    assert found == pytest.approx(np.dot(alone, [1, 2, 3]) / 6)


def test_a_rejected_piece_counts_six_times_an_accepted_one():
    tensors = tuple(torch.zeros(shape) for shape in head_shapes(3).values())
    states, weight = torch.zeros(1, 2, 3), torch.tensor([[1.0, 0.0]])
    for label, expected in ((1.0, np.log(2)), (0.0, 6 * np.log(2)), (0.5, 3.5 * np.log(2))):
        labels = torch.full((1, 2), label)
        assert float(acceptance_loss(states, tensors, labels, weight)) == pytest.approx(expected)
