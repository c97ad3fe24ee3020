"""The graph that only fills the cache: no head in it, and nobody misses it."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from letters_tokenizer import Letters
from reference_models import random_ids
from simulated_htp import open_simulated

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.qnn.provider import QNN_PROVIDER, placement
from omnidraft_npu.quantize.calibration.htp_quantization import quantize_htp_decoder
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from omnidraft_npu.quantize.recipes import RECIPES
from omnidraft_npu.runtime.static_lm import StaticModel

SHAPE = {"lengths": (1, 4, 16), "context_length": 32, "has_hidden_states": True, "lora_rank": 2}


@pytest.fixture(scope="module")
def made(models, tmp_path_factory):
    """A model, its graphs as they are deployed, and the same with logits everywhere."""
    model, root = models("qwen3"), tmp_path_factory.mktemp("prefill")
    source = (model.config, model.tensors.__getitem__)
    options = HtpGraphOptions(**SHAPE, prefill_length=16)
    fp16 = RECIPES["fp16"]
    graphs = quantize_htp_decoder(*source, Letters(), root / "made", options, fp16).graphs
    return model, graphs, build_htp_decoder(*source, root / "whole", HtpGraphOptions(**SHAPE))


def on_cpu(path):
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def opened(model, graphs, open_session=on_cpu):
    return StaticModel.open(
        graphs, open_session, provider="CPU", vocab_size=model.config.num_logits
    )


def test_neither_the_head_nor_the_end_of_the_last_layer_is_left_in_it(made):
    model, graphs, whole = made
    last = model.config.num_layers - 1
    onnx.checker.check_model(graphs[16])
    short, full = (onnx.load(g[16], load_external_data=False).graph for g in (graphs, whole))
    names = {node.output[0] for node in short.node}
    assert {v.name for v in full.output} - {v.name for v in short.output} == {
        "logits",
        "hidden_states",
    }
    assert f"layers.{last}.k_proj" in names
    assert not names & {"lm_head", "final_norm", f"layers.{last}.o_proj", f"layers.{last}.scores"}
    kept = {tensor.name for tensor in short.initializer}
    assert "lm_head.weight" not in kept
    assert kept < {tensor.name for tensor in full.initializer}
    for length in (1, 4):
        assert graphs[length].read_bytes() == whole[length].read_bytes()


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_conversation_is_the_same_without_it(made, rng, is_exact):
    """Prompt by the long graph; then more tokens at once than a graph with logits takes."""
    model, graphs, whole = made
    ids = random_ids(rng, 30)
    rows = []
    for chosen in (graphs, whole):
        lm = opened(model, chosen).begin(is_exact=is_exact)
        lm.prefill(ids[:18])
        rows.append([lm.score(ids[18:19]).copy(), lm.score(ids[19:]).copy(), lm.hidden_states])
    for found, expected in zip(*rows, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    assert opened(model, graphs).signature.scored_lengths == (1, 4)
    assert opened(model, graphs).pass_length == 4


def test_it_is_one_graph_on_the_simulator(made, rng):
    model, graphs, _ = made
    ids = random_ids(rng, 18)
    simulated = opened(model, graphs, open_simulated)
    (part,) = simulated.sessions[16].get_provider_graph_assignment_info()
    assert placement(simulated.sessions[16]) == {QNN_PROVIDER: len(part.get_nodes())}
    rows = []
    for chosen in (simulated, opened(model, graphs)):
        lm = chosen.begin()
        lm.prefill(ids[:16])
        rows.append(lm.score(ids[16:]).copy())
    assert np.linalg.norm(rows[0] - rows[1]) < 1e-2 * np.linalg.norm(rows[1])


def test_a_length_for_prefill_alone_is_refused():
    with pytest.raises(ConfigError, match="prefill_length is 16"):
        HtpGraphOptions(lengths=(16,), context_length=32, prefill_length=16)
    with pytest.raises(ConfigError, match="prefill_length is 8"):
        HtpGraphOptions(lengths=(1, 16), context_length=32, prefill_length=8)
