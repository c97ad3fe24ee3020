"""A token's logits have the same bits alone and among drafts, whatever the passes' lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel
from omnidraft_npu.runtime.stable_passes import stable_passes

VOCAB = 160
CONTEXT = 256


@given(st.integers(0, 1000), st.integers(1, 200), st.sampled_from([64, 128, 256]))
def test_passes_cover_the_tokens_and_never_mix_the_halves_of_a_block(start, num_tokens, head_dim):
    passes = stable_passes(start, num_tokens, head_dim)
    assert sum(passes) == num_tokens
    assert min(passes) >= 1
    if head_dim <= 128:
        assert passes == [num_tokens]
        return
    for length in passes:
        positions = np.arange(start, start + length)
        assert not ((positions % 128 == 62) & (positions < start + length - 1)).any()
        start += length


@pytest.fixture(scope="module", params=[("llama", 64), ("gemma3_text", 256)], ids=["64", "256"])
def checkpoint(request, tmp_path_factory):
    architecture, head_dim = request.param
    folder = tmp_path_factory.mktemp(architecture)
    # The sliding window of the tiny Gemma would hide all but a few keys.
    own = {"sliding_window": 200} if architecture == "gemma3_text" else {}
    model = tiny_model(
        architecture, vocab_size=VOCAB, head_dim=head_dim, max_position_embeddings=CONTEXT, **own
    )
    model.save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_logits_have_the_same_bits_for_every_pass_length(checkpoint, precision, tmp_path, rng):
    options = CpuGraphOptions(precision=precision, context_length=CONTEXT)
    build_cpu_decoder(checkpoint.config, checkpoint.tensor, tmp_path, options)
    model = OnnxModel.open(
        tmp_path / "model.onnx",
        context_length=CONTEXT,
        vocab_size=VOCAB,
        num_logits=VOCAB,
        cache="shared",
        threads=2,
    )
    lm = OnnxCausalLM(model)
    token_ids = rng.integers(3, VOCAB, 240).tolist()

    def logits(length):
        lm.rewind(0)
        lm.prefill(token_ids[:20])
        rows = []
        for start in range(20, len(token_ids), length):
            rows.append(lm.score(token_ids[start : start + length]).copy())
        return np.concatenate(rows)

    alone = logits(1)
    for length in (2, 3, 5, 8):
        np.testing.assert_array_equal(logits(length), alone)
