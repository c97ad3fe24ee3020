"""The CPU graph against transformers on tiny random models."""

from pathlib import Path

import numpy as np
import pytest
from graph_runner import GraphRunner
from reference_models import VARIANTS, assert_close, random_ids, random_lora
from tiny_models import ARCHITECTURES

from omnidraft_npu.errors import ConfigError, ExportError
from omnidraft_npu.lora import MODULES
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.quantize.weight_quantization import quantize_blocks

CAPACITY = 256


@pytest.fixture
def build(tmp_path):
    def run(model, *, tensors=None, is_shared=True, **options) -> GraphRunner:
        folder = tmp_path / f"graph{len(list(tmp_path.iterdir()))}"
        options = {"precision": "fp32", "context_length": CAPACITY} | options
        path = build_cpu_decoder(
            model.config,
            (tensors or model.tensors).__getitem__,
            folder,
            CpuGraphOptions(**options),
        )
        return GraphRunner(path, capacity=CAPACITY, is_shared=is_shared)

    return run


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_however_the_tokens_come(models, build, rng, variant, is_shared):
    """One prefill; tokens one by one, in runs and in chunks; past the window; up to the end."""
    model = models(variant)
    ids = random_ids(rng, CAPACITY)
    expected = model.logits(ids)
    graph = build(model, is_shared=is_shared)

    assert_close(graph.run(ids), expected)
    graph.rewind(0)
    assert_close(graph.run_in_pieces(ids[:60], [20, 1, 1, 1, 5, 1, 9, 22]), expected[:60])
    graph.rewind(0)
    assert_close(graph.run_in_pieces(ids, [64] * 3 + [32, 1, 1, 30]), expected)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_after_a_rewind_the_dropped_tokens_have_no_influence(
    models, build, rng, variant, is_shared
):
    model = models(variant)
    kept, dropped, new = random_ids(rng, 30), random_ids(rng, 12), random_ids(rng, 9)
    graph = build(model, is_shared=is_shared)
    graph.run(kept + dropped)

    graph.rewind(len(kept))
    rows = graph.run_in_pieces(new, [1, 4, 1, 3])
    assert_close(rows, model.logits(kept + new)[len(kept) :])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_window_counts_the_current_token(models, build, rng, one_by_one):
    """With a window of 8 a token sees itself and 7 before it; one layer hides no off-by-one."""
    graph = build(models("mistral-sliding", num_hidden_layers=1))
    ids = random_ids(rng, 20)
    lengths = [1] * 20 if one_by_one else [20]
    rows = graph.run_in_pieces(ids, lengths)
    ids[8] = (ids[8] + 1) % 160
    graph.rewind(0)
    changed = np.abs(graph.run_in_pieces(ids, lengths) - rows).max(axis=1) > 1e-5

    assert np.flatnonzero(changed).tolist() == list(range(8, 16))


def test_logits_from_gives_the_last_rows_of_all(models, build, rng):
    graph = build(models("llama"))
    ids = random_ids(rng, 12)
    rows = graph.run(ids)
    for first in (0, 5, 11):
        graph.rewind(0)
        assert_close(graph.run(ids, first), rows[first:])
    assert graph.run(ids, 12).shape == (0, 160)


@pytest.mark.parametrize("variant", ["llama", "gemma3_text"])
def test_hidden_states_are_what_the_head_reads(models, build, rng, variant):
    model = models(variant)
    ids = random_ids(rng, 15)
    graph = build(model, has_hidden_states=True)

    graph.run(ids[:10])
    graph.run(ids[10:], 3)
    assert_close(graph.hidden_states, model.hidden_states(ids)[10:])


@pytest.mark.parametrize("variant", ["llama-biases", "gemma3_text"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_lora_of_zeros_changes_nothing(models, build, rng, variant, precision):
    model = models(variant)
    ids = random_ids(rng, 15)
    plain = build(model, precision=precision).run(ids)

    assert_close(build(model, precision=precision, lora_rank=3).run(ids), plain, 1e-6)


@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "down_proj")])
@pytest.mark.parametrize("variant", ["llama-biases", "gemma3_text", "llama-heads-of-100"])
def test_a_lora_is_the_same_as_merged_weights(models, build, rng, variant, modules):
    model = models(variant)
    ids = random_ids(rng, 15)
    graph = build(model, lora_rank=3, lora_modules=modules)
    graph.lora, merged = random_lora(rng, model, graph.lora)

    assert len(graph.lora) == 2 * len(modules) * model.config.num_layers
    rows = graph.run(ids)
    assert_close(rows, build(model, tensors=merged).run(ids))
    assert np.abs(rows - model.logits(ids)).max() > 0.05 * np.ptp(rows)


@pytest.mark.parametrize("head_dim", [2, 8, 14, 24, 72, 120])
@pytest.mark.parametrize("variant", ["qwen3", "mistral-sliding"])
def test_heads_need_not_be_multiples_of_16(models, build, rng, variant, head_dim):
    """GroupQueryAttention takes no other sizes; OpenLLaMA-3B has 100, danube3-4b 120."""
    model = models(variant, head_dim=head_dim, num_hidden_layers=2)
    ids = random_ids(rng, 24)
    expected = model.logits(ids)
    graph = build(model)

    assert_close(graph.run_in_pieces(ids, [15, 1, 5, 3]), expected)
    error = build(model, precision="int8").run(ids) - expected
    assert np.sqrt((error**2).mean()) < 0.05 * expected.std()


@pytest.mark.parametrize(
    "variant", ["llama3-scaled", "qwen2-untied", "gemma3_text", "gemma3-heads-of-40"]
)
def test_an_int8_graph_is_its_dequantised_weights_up_to_8_bit_activations(
    models, build, rng, variant
):
    model = models(variant)
    ids = random_ids(rng, 40)
    rounded = {
        name: quantize_blocks(tensor, 8).dequantize() if is_projection(name) else tensor
        for name, tensor in model.tensors.items()
    }

    rows = build(model, precision="int8").run(ids)
    assert_close(rows, build(model, tensors=rounded).run(ids), 0.03)
    assert_close(rows, model.logits(ids), 0.03)


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_an_int4_graph_stays_near_the_float_model(models, build, rng, variant):
    model = models(variant)
    ids = random_ids(rng, 40)
    expected = model.logits(ids)
    error = build(model, precision="int4").run(ids) - expected

    assert np.sqrt((error**2).mean()) < 0.35 * expected.std()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_sizes_need_not_be_multiples_of_the_block(models, build, rng, precision):
    model = models("llama3-scaled", hidden_size=40, intermediate_size=72, head_dim=16)
    ids = random_ids(rng, 20)
    expected = model.logits(ids)
    error = build(model, precision=precision).run(ids) - expected

    bound = {"fp32": 1e-6, "int8": 0.05, "int4": 0.35}[precision]
    assert np.sqrt((error**2).mean()) < bound * expected.std()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_tied_head_shares_the_bytes_of_the_embedding(models, tmp_path, precision):
    """The embedding of a small model is most of its size."""
    model = models("llama3-scaled", vocab_size=4096)
    options = CpuGraphOptions(precision=precision, context_length=16)
    path = build_cpu_decoder(model.config, model.tensors.__getitem__, tmp_path, options)

    weights = 4096 * 64 * {"fp32": 4.0, "int8": 1.16}[precision]
    assert path.with_suffix(".onnx.data").stat().st_size < 1.7 * weights


def test_each_tensor_is_read_once_and_named_to_progress(models, tmp_path):
    model = models("qwen2-untied")
    reads, told = [], []

    def read(name):
        reads.append(name)
        return model.tensors[name]

    options = CpuGraphOptions(precision="int4", context_length=16)
    build_cpu_decoder(model.config, read, tmp_path, options, told.append)
    assert sorted(reads) == sorted(model.config.tensor_shapes()) == sorted(told)


def test_a_tensor_that_cannot_be_read_leaves_no_files(models, tmp_path):
    model = models("llama")

    def read(name):
        if name == "layers.2.down_proj":
            raise ExportError("the shard is truncated")
        return model.tensors[name]

    with pytest.raises(ExportError, match="truncated"):
        build_cpu_decoder(model.config, read, tmp_path, CpuGraphOptions(context_length=16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value"), [("context_length", 0), ("lora_rank", -1), ("lora_modules", ("head",))]
)
def test_options_that_make_no_sense_are_named(field, value):
    with pytest.raises(ConfigError, match=field):
        CpuGraphOptions(**{"context_length": 16, field: value})


def is_projection(name):
    return name.endswith("_proj") or name in ("embed_tokens", "lm_head")


def test_the_graph_is_small_beside_its_data(models, tmp_path):
    options = CpuGraphOptions(precision="int8", context_length=16)
    model = models("gemma3_text")
    path: Path = build_cpu_decoder(model.config, model.tensors.__getitem__, tmp_path, options)
    assert path == tmp_path / "model.onnx"
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
