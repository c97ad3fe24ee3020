import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto as T
from static_graphs import HIDDEN, HIDDEN_BY_MASK, StaticVariant, write_static_decoder

from omnidraft_npu.errors import BundleError, PromptError
from omnidraft_npu.runtime.providers import open_cpu_session
from omnidraft_npu.runtime.static_lm import StaticCausalLM, StaticModel
from omnidraft_npu.runtime.static_masks import MaskRows

PLAIN = StaticVariant()
SLIDING = StaticVariant(sliding_window=5)
RICH = StaticVariant(sliding_window=7, has_hidden_states=True, lora_rank=2)
VARIANTS = {"plain": PLAIN, "sliding": SLIDING, "rich": RICH}
DTYPES = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(uint16)": np.uint16}
CONTEXT, VOCAB = PLAIN.context_length, 44
LENGTHS = (1, 4, 16)
IDS = [int(i) for i in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]


def open_model(folder, variant, lengths=LENGTHS, **settings):
    names = write_static_decoder(folder, lengths, variant)
    settings = {"vocab_size": VOCAB, "sliding_window": variant.sliding_window} | settings
    return StaticModel.open(
        {int(length): folder / name for length, name in names.items()},
        lambda path: open_cpu_session(path, threads=1),
        provider="CPUExecutionProvider",
        **settings,
    )


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def model(request, tmp_path):
    return open_model(tmp_path, request.param)


def whole_pass(folder, variant, token_ids, lora=None):
    """``[n, num_logits]`` of one pass over an empty cache, with masks written out in full."""
    n = len(token_ids)
    names = write_static_decoder(folder / "whole", (n,), variant)
    session = open_cpu_session(folder / "whole" / names[str(n)], threads=1)
    i, j = np.ogrid[:n, :n]
    masks = {
        "attention_mask": j > i,
        "sliding_mask": (j > i) | (j <= i - (variant.sliding_window or n)),
    }
    feeds = {
        "input_ids": np.array([token_ids], np.int32),
        "position_ids": np.arange(n, dtype=np.int32)[None],
    }
    for name, is_hidden in masks.items():
        mask = np.full((1, 1, n, variant.context_length + n), HIDDEN_BY_MASK, np.float32)
        mask[0, 0, :, variant.context_length :][~is_hidden] = 0
        feeds[name] = mask
    known = {i.name: i for i in session.get_inputs()}
    for name, node in known.items():
        if name not in feeds:
            feeds[name] = np.zeros(node.shape, DTYPES[node.type])
    feeds |= lora or {}
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, {n: v for n, v in feeds.items() if n in known})
    return dict(zip(names, values, strict=True))


def test_passes_of_any_length_give_the_logits_of_one_whole_pass(tmp_path, model):
    variant = next(v for v in VARIANTS.values() if has_shape(model, v))
    expected = whole_pass(tmp_path, variant, IDS)["logits"][0, :, :VOCAB]
    for is_exact in (True, False):
        lm = StaticCausalLM(model, is_exact=is_exact)
        rows, start = [], 0
        for n in (1, 3, 1, 4, 5, 16, 1, 17):
            rows += [*lm.score(IDS[start : start + n]).copy()]
            start += n
        assert start == len(IDS) == lm.length == lm.context_length
        np.testing.assert_allclose(rows, expected, atol=2e-5)


def has_shape(model, variant):
    signature = model.signature
    return signature.has_sliding_mask == (variant.sliding_window is not None) and bool(
        signature.lora_inputs
    ) == bool(variant.lora_rank)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_rewinding_and_prefilling_leave_no_trace(tmp_path, variant):
    model = open_model(tmp_path, variant)
    expected = whole_pass(tmp_path, variant, IDS)["logits"][0, :, :VOCAB]
    lm, rng = StaticCausalLM(model, is_exact=False), np.random.default_rng(3)
    for _ in range(40):
        lm.rewind(int(rng.integers(0, lm.length + 1)))
        room = CONTEXT - lm.length
        if room < 2:
            continue
        noise = [int(i) for i in rng.integers(0, VOCAB, rng.integers(1, room + 1))]
        start = lm.length
        lm.prefill(noise)
        lm.score(noise[:1]) if lm.length < CONTEXT else None
        lm.rewind(start)
        n = int(rng.integers(1, room))
        lm.prefill(IDS[start : start + n])
        np.testing.assert_allclose(
            lm.score(IDS[start + n : start + n + 1])[0], expected[start + n], atol=2e-5
        )
        assert lm.token_ids.tolist() == IDS[: start + n + 1]


def test_a_target_scores_a_token_by_the_same_graph_alone_and_among_drafts(tmp_path, monkeypatch):
    model = open_model(tmp_path, PLAIN)
    used = []
    for is_exact in (True, False):
        lm = StaticCausalLM(model, is_exact=is_exact)
        lm.prefill(IDS[:9])
        monkeypatch.setattr(
            lm, "_pass", lambda length, take=lm._pass: used.append(length) or take(length)
        )
        for n in (1, 2, 4, 6):
            lm.score(IDS[9 : 9 + n])
            lm.rewind(9)
    assert used == [4, 4, 4, 4, 4, 1, 4, 4, 16]


def test_two_conversations_share_graphs_and_nothing_else(tmp_path):
    model = open_model(tmp_path, RICH)
    one, other = StaticCausalLM(model), StaticCausalLM(model)
    alone = StaticCausalLM(model)
    expected = [alone.score([i])[0].copy() for i in IDS[:8]]
    rows = []
    for i, j in zip(IDS[:8], IDS[20:28], strict=True):
        row = one.score([i])
        other.score([j])
        rows.append(row[0].copy())
    np.testing.assert_array_equal(rows, expected)


def test_an_adapter_is_swapped_between_runs_and_changes_what_it_should(tmp_path):
    model = open_model(tmp_path, RICH)
    rng = np.random.default_rng(5)
    adapters = [
        {
            n: rng.normal(0, 0.3, s).astype(np.float32)
            for n, s in model.signature.lora_inputs.items()
        }
        for _ in range(2)
    ]
    lm = StaticCausalLM(model)
    for adapter in (*adapters, None, adapters[0]):
        lm.reset()
        lm.set_lora(adapter)
        lm.prefill(IDS[:6])
        expected = whole_pass(tmp_path, RICH, IDS[:8], adapter)
        np.testing.assert_allclose(lm.score(IDS[6:8]), expected["logits"][0, 6:, :VOCAB], atol=2e-5)
        np.testing.assert_allclose(lm.hidden_states, expected["hidden_states"][0, 6:], atol=2e-5)
    name = next(iter(adapters[0]))
    with pytest.raises(BundleError, match="no such input"):
        lm.set_lora({"lora.layers.9.q_proj.A": adapters[0][name]})
    with pytest.raises(BundleError, match="rank"):
        lm.set_lora({name: adapters[0][name][:, :1]})


def test_hidden_states_are_those_of_the_last_score(tmp_path):
    lm = StaticCausalLM(open_model(tmp_path, RICH))
    assert lm.hidden_states.shape == (0, HIDDEN)
    lm.score(IDS[:6])
    assert lm.hidden_states.shape == (6, HIDDEN)
    lm.prefill(IDS[6:8])
    assert lm.hidden_states.shape == (0, HIDDEN)
    assert StaticCausalLM(open_model(tmp_path / "plain", PLAIN)).hidden_states is None


@pytest.mark.parametrize("kind", [T.UINT8, T.UINT16])
def test_a_quantised_cache_is_copied_as_it_is(tmp_path, kind):
    variant = StaticVariant(kv_type=kind)
    model = open_model(tmp_path, variant)
    lm = StaticCausalLM(model, is_exact=False)
    expected = whole_pass(tmp_path, variant, IDS[:20])["logits"][0, :, :VOCAB]
    lm.prefill(IDS[:9])
    lm.score(IDS[30:33])
    lm.rewind(9)
    rows = [*lm.score(IDS[9:11]).copy(), *lm.score(IDS[11:20])]
    np.testing.assert_allclose(rows, expected[9:], atol=2e-5)
    dtype = np.dtype(np.uint8 if kind == T.UINT8 else np.uint16)
    empty = model.begin()._cache.values()
    assert {values.dtype for values in empty} == {dtype}
    # Slots that no token has filled lie near zero, so that their hidden scores stay small.
    assert {int(values.min()) for values in empty} == {(np.iinfo(dtype).max + 1) // 2}


def test_a_full_context_and_nothing_to_score_are_refused(tmp_path):
    lm = StaticCausalLM(open_model(tmp_path, PLAIN))
    with pytest.raises(ValueError, match="nothing to score"):
        lm.score([])
    lm.prefill(IDS[:-2])
    told = f"{CONTEXT + 1} tokens do not fit.*{CONTEXT}.*--htp-context-length"
    for append in (lm.prefill, lm.score):
        with pytest.raises(PromptError, match=told):
            append(IDS[:3])
    assert lm.length == CONTEXT - 2
    with pytest.raises(ValueError, match="rewind"):
        lm.rewind(CONTEXT)
    assert np.isfinite(lm.score(IDS[-2:])).all()


def test_graphs_that_do_not_belong_together_are_refused(tmp_path):
    with pytest.raises(BundleError, match="49 ids"):
        open_model(tmp_path, PLAIN, vocab_size=49)
    with pytest.raises(BundleError, match="unknown window"):
        open_model(tmp_path, SLIDING, sliding_window=None)
    sessions = dict(open_model(tmp_path, PLAIN).sessions)
    mixed = {1: sessions[1], 4: open_model(tmp_path, RICH).sessions[4]}
    for wrong, words in ((mixed, "differ"), ({2: sessions[1]}, "no new rows")):
        with pytest.raises(BundleError, match=words):
            StaticModel(wrong, provider="", where="here", vocab_size=VOCAB, sliding_window=5)


def test_a_run_reuses_its_buffers(tmp_path, monkeypatch):
    """No input is bound or allocated again once a length has run."""
    lm = StaticCausalLM(open_model(tmp_path, SLIDING), is_exact=False)
    for n in (1, 4, 16):
        lm.score(IDS[:n])
        lm.prefill(IDS[:n])
        lm.reset()
    bound = []
    of_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
    monkeypatch.setattr(
        onnxruntime.OrtValue, "ortvalue_from_numpy", lambda a: bound.append(a) or of_numpy(a)
    )
    for n in (1, 3, 16, 2):
        lm.score(IDS[:n])
    assert bound == []


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_a_moved_mask_is_the_mask_written_out(window, rng):
    length, context = 4, 20
    mask = MaskRows(length, context, window)
    for start in (0, *rng.integers(0, context + 1, 60)):
        mask.move(int(start))
        position = start + np.arange(length)[:, None]
        slot, new = np.arange(context), start + np.arange(length)
        seen = np.concatenate(
            [np.broadcast_to(slot < start, (length, context)), new <= position], axis=1
        )
        column = np.concatenate([slot, new])
        if window is not None:
            seen = seen & (column > position - window)
        np.testing.assert_array_equal(mask.values[0, 0] == 0, seen)
        assert set(np.unique(mask.values)) <= {0.0, -100.0}
