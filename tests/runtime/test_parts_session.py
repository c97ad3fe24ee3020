"""A model in parts runs as the whole does, on the CPU provider and on the simulator."""

import numpy as np
import onnxruntime as ort
import pytest
from letters_tokenizer import Letters
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.errors import BundleError
from omnidraft_npu.quantize.calibration.htp_quantization import quantize_htp_decoder
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from omnidraft_npu.quantize.recipes import RECIPES
from omnidraft_npu.runtime.parts_session import PartsSession
from omnidraft_npu.runtime.static_lm import StaticModel

OPTIONS = HtpGraphOptions(lengths=(1, 4), context_length=16, lora_rank=2, has_hidden_states=True)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The whole model's graphs by length, then those of its two parts."""
    root = tmp_path_factory.mktemp("parts")
    checkpoint = open_checkpoint(write_checkpoint(root / "model", "gemma3_text", vocab_size=280))
    config = checkpoint.config
    layers = (range(1), range(1, config.num_layers))
    whole = build_htp_decoder(config, checkpoint.tensor, root / "whole", OPTIONS)
    recipe = RECIPES["fp16"]
    source = (config, checkpoint.tensor, Letters(), root / "split", OPTIONS, recipe)
    return whole, quantize_htp_decoder(*source, parts=layers).parts, config


def on_cpu(path):
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def opened(graphs, config, open_session=on_cpu):
    return StaticModel.open(
        graphs,
        open_session,
        provider="CPU",
        vocab_size=280,
        sliding_window=config.sliding_window,
    )


def conversation(model):
    """Logits and hidden states of prefill, rewind and another way on."""
    lm = model.begin(is_exact=False)
    rng = np.random.default_rng(0)
    signature = model.signature
    lm.set_lora(
        {n: rng.normal(0, 0.1, s).astype(np.float32) for n, s in signature.lora_inputs.items()}
    )
    lm.prefill([3, 7, 9, 4, 5])
    first = lm.score([8, 2, 6]).copy()
    lm.rewind(6)
    second = lm.score([1]).copy()
    return first, second, lm.hidden_states.copy()


def test_parts_answer_as_the_whole_does(graphs):
    whole, parts, config = graphs
    alone, joined = opened(whole, config), opened(parts, config)
    assert joined.signature.num_logits == alone.signature.num_logits
    assert {t.past for t in joined.signature.cache_tensors} == {
        t.past for t in alone.signature.cache_tensors
    }
    for expected, found in zip(conversation(alone), conversation(joined), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_parts_in_the_wrong_order_are_refused(graphs):
    _, parts, config = graphs
    with pytest.raises(BundleError, match="part 1 does not take what part 0 gives"):
        opened(parts[::-1], config)


def test_every_node_of_every_part_runs_on_the_simulator(graphs):
    pytest.importorskip("onnxruntime_qnn")
    from omnidraft_npu.qnn.provider import QNN_PROVIDER, open_qnn_session, placement

    _, parts, config = graphs

    def on_htp(path):
        return open_qnn_session(path, soc_model=60, simulate=True)

    only = [{4: part[4]} for part in parts]
    joined = opened(only, config, on_htp)
    assert set(placement(joined.sessions[4])) == {QNN_PROVIDER}
    found = joined.begin().score([3, 7, 9, 4])
    expected = opened(only, config).begin().score([3, 7, 9, 4])
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-2


def test_a_session_of_one_part_is_that_part(graphs):
    whole, _, _ = graphs
    session = on_cpu(whole[1])
    joined = PartsSession([session], "here")
    assert [i.name for i in joined.get_inputs()] == [i.name for i in session.get_inputs()]
