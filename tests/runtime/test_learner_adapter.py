"""The adapter that a drafter is fed: one that does not fit is reported, and never fed."""

import numpy as np
import pytest

from omnidraft_npu.acceptance_head import AcceptanceHead
from omnidraft_npu.runtime.adapter_files import AdapterKey
from omnidraft_npu.runtime.adapter_store import BASE, AdapterStore
from omnidraft_npu.runtime.learner_adapter import AdapterInUse

KEY = AdapterKey(drafter_sha256="d" * 64, target_tokenizer_sha256="t" * 64, rank=2)
SHAPES = {"lora.layers.0.q_proj.A": (64, 2), "lora.layers.0.q_proj.B": (2, 32)}


@pytest.mark.parametrize(("width", "is_used"), [(64, True), (48, False)])
def test_an_adapter_whose_head_is_for_other_hidden_states_is_not_used(
    tmp_path, caplog, width, is_used
):
    """It was a traceback of numpy in the middle of an answer."""
    store = AdapterStore(tmp_path, KEY)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    head = AcceptanceHead.fresh(width, np.random.default_rng(0)).tensors
    store.use(store.add({**tensors, **head}, parent=BASE).version)
    used = AdapterInUse(store)
    used.load(SHAPES)
    assert (used.adapter.version == 1) is is_used
    assert ("takes hidden states of 48" in caplog.text) is not is_used
