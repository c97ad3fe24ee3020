"""Greedy decoding and verification agree to the bit, whatever the precision."""

import platform
from pathlib import Path

import numpy as np
import pytest
from omnidraft_npu.quantize.architecture import DecoderConfig, RopeConfig
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel

CONTEXT, NUM_LOGITS = 300, 160
IDS = [int(i) for i in np.random.default_rng(2).integers(0, NUM_LOGITS, CONTEXT)]

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"),
    reason="which kernels sum in the same order is known for x86-64 only",
)


@pytest.fixture(scope="module", params=[("int4", 64), ("int8", 128), ("fp32", 64)], ids=str)
def model(request, tmp_path_factory):
    precision, head_dim = request.param
    return write_and_open(tmp_path_factory.mktemp("model"), precision, head_dim)


def write_and_open(folder: Path, precision: str, head_dim: int) -> OnnxModel:
    """A random decoder with layers that see everything and layers that see a window."""
    config = DecoderConfig(
        architecture="llama",
        num_layers=6,
        hidden_size=128,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        num_logits=NUM_LOGITS,
        context_length=CONTEXT,
        norm_eps=1e-5,
        rope=RopeConfig(base=10000.0),
        layer_types=("full", "sliding") * 3,
        sliding_window=20,
        attention_scale=head_dim**-0.5,
    )
    rng = np.random.default_rng(0)
    shapes = config.tensor_shapes()

    def tensor(name):
        shape = shapes[name]
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
        return (rng.normal(size=shape) * scale).astype(np.float32)

    options = CpuGraphOptions(precision=precision, context_length=CONTEXT, has_spare_rows=True)
    graph = build_cpu_decoder(config, tensor, folder, options)
    sizes = {"context_length": CONTEXT, "vocab_size": NUM_LOGITS, "num_logits": NUM_LOGITS}
    return OnnxModel.open(graph, cache="shared", threads=2, **sizes)


def rows(model, chunk, end):
    lm = OnnxCausalLM(model)
    parts = [lm.score(IDS[i : min(i + chunk, end)]).copy() for i in range(0, end, chunk)]
    return np.concatenate(parts)


@pytest.mark.parametrize("chunk", [2, 3, 5, 8, 33, 280])
def test_a_tokens_logits_do_not_depend_on_what_is_scored_with_it(model, chunk):
    """Where they do, even by a rounding, int8 and int4 models amplify it to several percent."""
    np.testing.assert_array_equal(rows(model, chunk, 280), rows(model, 1, 280))


def test_a_prefill_fills_the_cache_as_scoring_does(model):
    prefilled, scored = OnnxCausalLM(model), OnnxCausalLM(model)
    prefilled.prefill(IDS[:70])
    for i in IDS[:70]:
        scored.score([i])
    np.testing.assert_array_equal(prefilled.score(IDS[70:73]), scored.score(IDS[70:73]))


def test_the_context_can_be_filled_to_its_last_slot(model):
    """No spare row fits behind the last token; close is then close enough."""
    expected = rows(model, CONTEXT, CONTEXT)
    got = rows(model, 1, CONTEXT)
    np.testing.assert_array_equal(got[:-1], expected[:-1])
    assert np.argmax(got[-1]) == np.argmax(expected[-1])
