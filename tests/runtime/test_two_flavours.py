"""The NPU's graphs of real architectures, on the CPU provider, against the CPU's own."""

import numpy as np
import pytest
from reference_models import random_ids, reference_model
from tiny_models import ARCHITECTURES

from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions, build_htp_decoder
from omnidraft_npu.runtime.causal_lm import OnnxModel
from omnidraft_npu.runtime.providers import open_cpu_session
from omnidraft_npu.runtime.static_lm import StaticModel

CONTEXT = 160


@pytest.fixture(scope="module", params=ARCHITECTURES)
def both(request, tmp_path_factory):
    """One model in both flavours, with LoRA inputs and hidden states."""
    root = tmp_path_factory.mktemp(request.param)
    model = reference_model(root / "checkpoint", request.param)
    tensors, extras = model.tensors.__getitem__, {"lora_rank": 2, "has_hidden_states": True}
    cpu = build_cpu_decoder(
        model.config,
        tensors,
        root / "cpu",
        CpuGraphOptions(precision="fp32", context_length=CONTEXT, **extras),
    )
    htp = build_htp_decoder(
        model.config,
        tensors,
        root / "htp",
        HtpGraphOptions(lengths=(1, 8, 128), context_length=CONTEXT, **extras),
    )
    plain = OnnxModel.open(
        cpu,
        context_length=CONTEXT,
        vocab_size=150,
        num_logits=model.config.num_logits,
        cache="shared",
        threads=1,
    )
    static = StaticModel.open(
        htp,
        lambda path: open_cpu_session(path, threads=1),
        provider="CPUExecutionProvider",
        vocab_size=150,
        sliding_window=model.config.sliding_window,
    )
    return plain, static


def close(one, other):
    assert one.shape == other.shape
    assert np.abs(one - other).max() < 1e-4 * np.ptp(other)


def test_both_flavours_decode_the_same_to_the_end_of_the_context(both, rng):
    """Prompts, drafts, rejected drafts and single tokens, past every sliding window."""
    cpu, npu = (model.begin() for model in both)
    ids = random_ids(rng, CONTEXT)
    start = 133
    for lm in (cpu, npu):
        lm.prefill(ids[:start])
    while start < CONTEXT:
        drafted = ids[start : start + int(rng.integers(1, 9))]
        wrong = [*drafted[:-1], (drafted[-1] + 1) % 150]
        close(npu.score(wrong), cpu.score(wrong))
        close(npu.hidden_states, cpu.hidden_states)
        start += len(drafted) - 1 or 1
        for lm in (cpu, npu):
            lm.rewind(start)
            assert lm.length == start
    np.testing.assert_array_equal(npu.token_ids, cpu.token_ids)
    for lm in (cpu, npu):
        lm.rewind(5)
    close(npu.score(ids[40:60]), cpu.score(ids[40:60]))


def test_both_flavours_take_the_same_adapters(both, rng):
    cpu, npu = (model.begin(is_exact=False) for model in both)
    ids = random_ids(rng, 12)
    shapes = both[1].signature.lora_inputs
    adapter = {n: rng.normal(0, 0.2, s).astype(np.float32) for n, s in shapes.items()}
    bare = npu.score(ids).copy()
    for tensors in (adapter, None):
        rows = []
        for lm in (cpu, npu):
            lm.reset()
            lm.set_lora(tensors)
            lm.prefill(ids[:3])
            rows.append(lm.score(ids[3:]).copy())
        close(rows[1], rows[0])
        assert (np.abs(rows[1] - bare[3:]).max() > 0.1) == (tensors is not None)
