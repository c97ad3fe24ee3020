"""The runtime swaps adapters of a quantised model on the simulator; nothing is compiled anew."""

import functools
import string

import numpy as np
import onnxruntime
from reference_models import random_ids, random_lora
from simulated_htp import open_simulated, relative_error

from omnidraft_npu.qnn.provider import QNN_PROVIDER, placement
from omnidraft_npu.quantize.calibration.htp_quantization import quantize_htp_decoder
from omnidraft_npu.quantize.htp.decoder_graph import HtpGraphOptions
from omnidraft_npu.quantize.recipes import RECIPES
from omnidraft_npu.runtime.providers import open_cpu_session
from omnidraft_npu.runtime.static_lm import StaticModel

QNN_ERROR = 3e-2
"""Relative L2 of the logits against the CPU provider on the same graph."""


class Letters:
    """A tokenizer of the tiny models' size."""

    bos_token_id = None

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [3 + string.printable.find(letter) for letter in text[:12]]


def test_adapters_of_a_quantised_model_are_swapped_between_runs(models, tmp_path, monkeypatch):
    model = models("qwen2", num_hidden_layers=1)
    made = quantize_htp_decoder(
        model.config,
        model.tensors.__getitem__,
        Letters(),
        tmp_path,
        HtpGraphOptions(lengths=(4,), context_length=16, lora_rank=2),
        RECIPES["w8a16"],
    )
    opening = {"simulated": open_simulated, "cpu": functools.partial(open_cpu_session, threads=1)}
    lms = {}
    for name, open_session in opening.items():
        opened = StaticModel.open(made.graphs, open_session, provider="", vocab_size=160)
        lms[name] = opened.begin()
        assert len(opened.signature.lora_inputs) == 2 * 7
    for session in lms["simulated"].model.sessions.values():
        assert set(placement(session)) == {QNN_PROVIDER}
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    zeros = {n: np.zeros(s, np.float32) for n, s in opened.signature.lora_inputs.items()}
    adapters = [random_lora(np.random.default_rng(seed), model, zeros)[0] for seed in (1, 2)]
    ids = random_ids(np.random.default_rng(3), 7)

    rows = []
    for adapter in (None, *adapters, adapters[0], None):
        both = {}
        for name, lm in lms.items():
            lm.reset()
            lm.set_lora(adapter)
            lm.prefill(ids[:4])
            both[name] = lm.score(ids[4:]).copy()
        rows.append(both["simulated"])
        assert relative_error(both["simulated"], both["cpu"]) < QNN_ERROR
    np.testing.assert_array_equal(rows[1], rows[3])
    np.testing.assert_array_equal(rows[0], rows[4])
    assert relative_error(rows[1], rows[0]) > 5 * QNN_ERROR
    assert relative_error(rows[2], rows[1]) > 5 * QNN_ERROR
