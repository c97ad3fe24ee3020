"""The HTP graphs against transformers on tiny random models, on the CPU provider."""

import numpy as np
import onnx
import pytest
from reference_models import VARIANTS, assert_close, random_ids, random_lora
from static_runner import StaticRunner
from tiny_models import ARCHITECTURES

from omnidraft_npu.errors import ConfigError, ExportError
from omnidraft_npu.lora import MODULES
from omnidraft_npu.quantize.htp.decoder_graph import WEIGHTS, HtpGraphOptions, build_htp_decoder

CONTEXT = 64
LENGTHS = (1, 8, 24)


@pytest.fixture
def build(tmp_path):
    def run(model, *, tensors=None, **options) -> StaticRunner:
        folder = tmp_path / f"graph{len(list(tmp_path.iterdir()))}"
        options = {"lengths": LENGTHS, "context_length": CONTEXT} | options
        paths = build_htp_decoder(
            model.config,
            (tensors or model.tensors).__getitem__,
            folder,
            HtpGraphOptions(**options),
        )
        return StaticRunner(paths, sliding_window=model.config.sliding_window)

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_the_tokens_come(models, build, rng, variant):
    """Prefill in chunks, then tokens one by one and in runs; past the window; to the end."""
    model = models(variant)
    ids = random_ids(rng, CONTEXT)
    expected = model.logits(ids)
    graph = build(model)

    assert_close(graph.run_in_pieces(ids, [24, 20, 1, 1, 8, 3, 1, 6]), expected)
    graph.rewind(0)
    assert_close(graph.run_in_pieces(ids[:20], [1] * 20), expected[:20])


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_after_a_rewind_the_dropped_tokens_have_no_influence(models, build, rng, variant):
    model = models(variant)
    kept, dropped, new = random_ids(rng, 21), random_ids(rng, 8), random_ids(rng, 9)
    graph = build(model)
    graph.run(kept)
    graph.run(dropped)

    graph.rewind(len(kept))
    rows = graph.run_in_pieces(new, [1, 4, 1, 3])
    assert_close(rows, model.logits(kept + new)[len(kept) :])


@pytest.mark.parametrize("context_length", [8, 9])
def test_a_window_as_long_as_the_context_needs_no_mask(models, build, rng, context_length):
    model = models("gemma3_text")
    ids = random_ids(rng, context_length)
    graph = build(model, lengths=(context_length,), context_length=context_length)

    masks = {v.name for v in graph.sessions[context_length].get_inputs() if "mask" in v.name}
    assert ("sliding_mask" in masks) == (context_length > model.config.sliding_window)
    assert_close(graph.run(ids), model.logits(ids))


@pytest.mark.parametrize("variant", ["llama", "gemma3_text"])
def test_hidden_states_are_what_the_head_reads(models, build, rng, variant):
    model = models(variant)
    ids = random_ids(rng, 15)
    graph = build(model, has_hidden_states=True)

    graph.run(ids[:10])
    graph.run(ids[10:])
    assert_close(graph.outputs["hidden_states"], model.hidden_states(ids)[10:])


@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "down_proj")])
@pytest.mark.parametrize("variant", ["llama-biases", "gemma3_text"])
def test_a_lora_is_the_same_as_merged_weights(models, build, rng, variant, modules):
    """Queries are scaled before the product with the keys: the adapter must not notice."""
    model = models(variant)
    ids = random_ids(rng, 15)
    graph = build(model, lora_rank=3, lora_modules=modules)
    assert len(graph.lora) == 2 * len(modules) * model.config.num_layers
    assert_close(graph.run(ids), model.logits(ids))

    graph.lora, merged = random_lora(rng, model, graph.lora)
    graph.rewind(0)
    rows = graph.run(ids)
    assert_close(rows, build(model, tensors=merged).run(ids))
    assert np.abs(rows - model.logits(ids)).max() > 0.05 * np.ptp(rows)


@pytest.mark.parametrize("variant", ["llama", "llama3-scaled"])
def test_the_lengths_share_one_file_and_a_tied_head_its_bytes(models, build, tmp_path, variant):
    model = models(variant, vocab_size=1024)
    build(model)
    folder = tmp_path / "graph0"

    assert {path.name for path in folder.iterdir()} == {
        WEIGHTS,
        *(f"length_{length}.onnx" for length in LENGTHS),
    }
    bytes_of_tensors = sum(tensor.nbytes for tensor in model.tensors.values())
    assert (folder / WEIGHTS).stat().st_size < 1.3 * bytes_of_tensors
    assert all((folder / f"length_{length}.onnx").stat().st_size < 40_000 for length in LENGTHS)


@pytest.mark.parametrize("variant", ["qwen2-untied", "gemma3_text"])
def test_each_tensor_is_read_once_for_all_lengths_and_told(models, tmp_path, variant):
    model = models(variant)
    reads, told = [], []

    def read(name):
        reads.append(name)
        return model.tensors[name]

    options = HtpGraphOptions(lengths=LENGTHS, context_length=CONTEXT)
    build_htp_decoder(model.config, read, tmp_path, options, told.append)
    assert sorted(reads) == sorted(model.config.tensor_shapes()) == sorted(told)


@pytest.mark.parametrize("variant", VARIANTS)
def test_graphs_are_static_standard_and_finite(models, build, tmp_path, variant):
    """What the NPU's compiler asks for; a name means the same in the graphs of all lengths."""
    build(models(variant), lora_rank=2, has_hidden_states=True)
    names = []
    for length in LENGTHS:
        path = tmp_path / "graph0" / f"length_{length}.onnx"
        onnx.checker.check_model(path, full_check=True)
        graph = onnx.load(path).graph
        assert {node.domain for node in graph.node} == {""}
        for value in (*graph.input, *graph.output):
            assert all(size.dim_value > 0 for size in value.type.tensor_type.shape.dim)
        for tensor in graph.initializer:
            assert np.isfinite(onnx.numpy_helper.to_array(tensor, str(path.parent))).all()
        names.append([name for node in graph.node for name in node.output])
    assert names[0] == names[1] == names[2]


def test_a_tensor_that_cannot_be_read_leaves_no_files(models, tmp_path):
    model = models("llama")

    def read(name):
        if name == "layers.2.down_proj":
            raise ExportError("the shard is truncated")
        return model.tensors[name]

    options = HtpGraphOptions(lengths=LENGTHS, context_length=CONTEXT)
    with pytest.raises(ExportError, match="truncated"):
        build_htp_decoder(model.config, read, tmp_path, options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context_length", 0, "context_length is 0"),
        ("lengths", (), "lengths"),
        ("lengths", (1, 8, 8), "different"),
        ("lengths", (0, 8), "lengths has 0"),
        ("lengths", (1, 65), "65.*64 tokens of the context"),
        ("lora_rank", -1, "lora_rank"),
        ("lora_modules", ("head",), "head"),
    ],
)
def test_options_that_make_no_sense_are_named(field, value, message):
    with pytest.raises(ConfigError, match=message):
        HtpGraphOptions(**{"lengths": (1,), "context_length": 64, field: value})
