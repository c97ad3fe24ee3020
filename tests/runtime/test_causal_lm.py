import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from decoder_graphs import (
    BARE,
    GENAI,
    HALF,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    NUM_LOGITS,
    OPTIMUM,
    RANK,
    SHARED,
    VOCAB,
    Variant,
    write_decoder,
)

from omnidraft_npu.errors import BundleError, ConfigError, PromptError
from omnidraft_npu.lora import lora_name
from omnidraft_npu.runtime import causal_lm
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel
from omnidraft_npu.runtime.signature import read_signature

VARIANTS = {"shared": SHARED, "genai": GENAI, "optimum": OPTIMUM, "half": HALF, "bare": BARE}
CONTEXT = SHARED.context_length
IDS = [int(i) for i in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]


def open_model(folder: Path, variant: Variant, **settings) -> OnnxModel:
    path = write_decoder(folder / "model.onnx", variant)
    settings = {"context_length": CONTEXT, "vocab_size": VOCAB, "threads": 1} | settings
    return OnnxModel.open(path, num_logits=NUM_LOGITS, **settings)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def model(request, tmp_path):
    return open_model(tmp_path, request.param)


@pytest.fixture
def shared_model(tmp_path):
    return open_model(tmp_path, SHARED)


def test_scores_are_those_of_one_plain_run_of_the_graph(tmp_path):
    """Against `session.run` with an empty past: no binding, no cache, no buffers of ours."""
    model = open_model(tmp_path, OPTIMUM)
    feeds = {
        "input_ids": np.array([IDS[:20]]),
        "attention_mask": np.ones((1, 20), np.int64),
        "position_ids": np.arange(20)[None],
    }
    for tensor in model.signature.cache_tensors:
        feeds[tensor.past] = np.zeros((1, tensor.num_heads, 0, tensor.head_dim), tensor.dtype)
    (expected,) = model.session.run(["logits"], feeds)

    lm = OnnxCausalLM(model)
    lm.prefill(IDS[:7])
    rows = [*lm.score(IDS[7:8]).copy(), *lm.score(IDS[8:20])]

    np.testing.assert_allclose(rows, expected[0, 7:, :VOCAB], atol=1e-5)


def test_both_caches_give_the_logits_of_the_same_weights(tmp_path):
    shared, concat = (
        OnnxCausalLM(open_model(tmp_path, Variant(is_shared=shared))) for shared in (True, False)
    )
    for lm in (shared, concat):
        lm.prefill(IDS[:9])
        lm.score(IDS[20:30])
        lm.rewind(12)
    assert shared.model.signature.cache == "shared"
    assert concat.model.signature.cache == "concat"
    np.testing.assert_allclose(shared.score(IDS[9:20]), concat.score(IDS[9:20]), atol=1e-5)


def test_prefill_in_chunks_equals_prefill_at_once(model, monkeypatch):
    whole = OnnxCausalLM(model)
    monkeypatch.setattr(causal_lm, "PREFILL_CHUNK", 7)
    chunked = OnnxCausalLM(model)
    for lm in (whole, chunked):
        lm.prefill(IDS[:40])
    assert whole.length == chunked.length == 40
    np.testing.assert_allclose(whole.score([3, 4]), chunked.score([3, 4]), atol=1e-5)


def test_scoring_at_once_equals_scoring_one_by_one(model):
    at_once, one_by_one = OnnxCausalLM(model), OnnxCausalLM(model)
    expected = at_once.score(IDS[:30])
    rows = [one_by_one.score([i])[0].copy() for i in IDS[:30]]
    atol = 1e-3 if model.signature.logits_dtype == np.float16 else 1e-5
    np.testing.assert_allclose(rows, expected, atol=atol)


def test_logits_depend_on_every_cached_token(model):
    """The other tests compare runs; a cache that was never read would pass them all."""
    logits = []
    for first in (0, 1):
        lm = OnnxCausalLM(model)
        lm.prefill([first, *IDS[1:9]])
        logits.append(lm.score([5]).copy())
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


def test_rewound_tokens_leave_no_trace(model):
    clean, used = OnnxCausalLM(model), OnnxCausalLM(model)
    for lm in (clean, used):
        lm.prefill(IDS[:10])
    used.score(IDS[30:38])
    used.rewind(12)
    used.rewind(10)
    np.testing.assert_array_equal(used.score(IDS[10:14]), clean.score(IDS[10:14]))
    assert used.length == clean.length == 14
    assert used.token_ids.tolist() == IDS[:14]


@pytest.mark.parametrize("lengths", [(50, 31, 9, 1), (1, 50, 2)])
def test_prompts_of_falling_length_give_the_bits_of_a_fresh_conversation(model, lengths):
    """A stale row that took part, even masked, would change the sums."""
    used = OnnxCausalLM(model)
    for length in lengths:
        used.reset()
        prompt = IDS[-length:]
        fresh = OnnxCausalLM(model)
        for lm in (used, fresh):
            lm.prefill(prompt[:-1])
        np.testing.assert_array_equal(used.score(prompt[-1:]), fresh.score(prompt[-1:]))


def in_a_fresh_process(folder: Path, body: str) -> str:
    """What `body` prints, run with `lm`, a conversation with the graph in `folder`."""
    script = (
        "import numpy as np\n"
        "from pathlib import Path\n"
        "from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel\n"
        f"folder, ids = Path({str(folder)!r}), {IDS}\n"
        f"model = OnnxModel.open(folder / 'model.onnx', context_length={CONTEXT}, threads=1,\n"
        f"                       vocab_size={VOCAB}, num_logits={NUM_LOGITS})\n"
        f"lm = OnnxCausalLM(model)\n{body}"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    return done.stdout.decode()


def test_reset_equals_a_fresh_process(model, tmp_path):
    lm = OnnxCausalLM(model)
    lm.score(IDS[:60])
    lm.reset()
    lm.prefill(IDS[40:52])
    here = lm.score(IDS[:5])
    in_a_fresh_process(
        tmp_path, "lm.prefill(ids[40:52])\nnp.save(folder / 'fresh.npy', lm.score(ids[:5]))\n"
    )
    np.testing.assert_array_equal(here, np.load(tmp_path / "fresh.npy"))


def test_two_conversations_on_one_session_never_see_each_other(model):
    first, second, alone = OnnxCausalLM(model), OnnxCausalLM(model), OnnxCausalLM(model)
    expected = [alone.score([i])[0].copy() for i in IDS[:12]]
    for i in range(12):
        np.testing.assert_array_equal(first.score([IDS[i]])[0], expected[i])
        second.score(IDS[i + 20 : i + 23])
        second.rewind(max(0, second.length - 2))


def test_memory_stays_flat_over_200_generations(model, tmp_path):
    """After a warm-up, in a process of its own: a peak only counts where nothing hid below it."""
    grown = in_a_fresh_process(
        tmp_path,
        "from omnidraft_npu.memory import peak_rss_bytes\n"
        "for generation in range(230):\n"
        "    if generation == 30:\n"
        "        before = peak_rss_bytes()\n"
        "    lm.reset()\n"
        "    lm.prefill(ids[: 20 + generation % 20])\n"
        "    for i in range(10):\n"
        "        lm.score(ids[i : i + 1 + i % 4])\n"
        "        lm.rewind(lm.length - i % 2)\n"
        "print(peak_rss_bytes() - before)\n",
    )
    assert int(grown) < 2 * 2**20


def test_a_loop_of_1000_calls_opens_no_session(model, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a session was opened")

    lm = OnnxCausalLM(model)
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    for i in range(1000):
        lm.score(IDS[i % 40 : i % 40 + 2])
        lm.rewind(i % 20)


def test_a_prefill_needs_no_logits_where_the_graph_can_leave_them_out(shared_model):
    lm = OnnxCausalLM(shared_model)
    lm.score([1])
    lm._logits.view(16)[:] = 7.0
    lm.prefill(IDS[:12])
    assert (lm._logits.view(16) == 7.0).all()


def test_more_rows_than_ever_before_are_scored_right(shared_model):
    """The buffers grow; a binding to the old ones would be written to freed memory."""
    lm, other = OnnxCausalLM(shared_model), OnnxCausalLM(shared_model)
    lm.score(IDS[:2])
    lm.rewind(0)
    np.testing.assert_array_equal(lm.score(IDS[:60]), other.score(IDS[:60]))
    np.testing.assert_array_equal(lm.hidden_states, other.hidden_states)


def test_padding_rows_of_the_logits_are_cut_off(shared_model):
    lm = OnnxCausalLM(shared_model)
    assert lm.score([1, 2, 3]).shape == (3, VOCAB)
    assert lm.score([1]).dtype == np.float32


def test_hidden_states_belong_to_the_last_score(shared_model):
    lm, other = OnnxCausalLM(shared_model), OnnxCausalLM(shared_model)
    expected = other.score(IDS[:8]) is not None and other.hidden_states.copy()
    lm.prefill(IDS[:5])
    assert len(lm.hidden_states) == 0
    lm.score(IDS[5:8])
    np.testing.assert_allclose(lm.hidden_states, expected[5:8], atol=1e-5)


def test_a_graph_without_hidden_states_says_so(tmp_path):
    lm = OnnxCausalLM(open_model(tmp_path, GENAI))
    lm.score([1])
    assert lm.hidden_states is None


def test_an_adapter_changes_the_logits_until_it_is_taken_off(shared_model):
    lm, rng = OnnxCausalLM(shared_model), np.random.default_rng(3)
    plain = lm.score(IDS[:6]).copy()
    shapes = {"A": (HIDDEN, RANK), "B": (RANK, HEADS * HEAD_DIM)}
    adapter = {
        lora_name(LAYERS - 1, "q_proj", side): rng.normal(size=shape).astype(np.float32)
        for side, shape in shapes.items()
    }
    lm.reset()
    lm.set_lora(adapter)
    adapted = lm.score(IDS[:6]).copy()
    other = OnnxCausalLM(shared_model)
    np.testing.assert_array_equal(other.score(IDS[:6]), plain)
    lm.reset()
    lm.set_lora(None)

    assert np.abs(adapted - plain).max() > 1e-3
    np.testing.assert_array_equal(lm.score(IDS[:6]), plain)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lora.layers.9.q_proj.A": np.zeros((HIDDEN, RANK))}, "no such input"),
        ({"lora.layers.0.q_proj.A": np.zeros((HIDDEN, RANK + 1))}, "rank of the export"),
    ],
)
def test_an_adapter_of_another_model_is_refused(shared_model, tensors, message):
    with pytest.raises(BundleError, match=message):
        OnnxCausalLM(shared_model).set_lora(tensors)


@pytest.mark.parametrize("call", ["prefill", "score"])
def test_tokens_past_the_context_are_refused_and_nothing_is_appended(model, call):
    lm = OnnxCausalLM(model)
    lm.prefill(IDS[: CONTEXT - 2])
    with pytest.raises(PromptError, match=f"{CONTEXT + 1} tokens do not fit .* {CONTEXT}"):
        getattr(lm, call)([1, 2, 3])
    assert lm.length == CONTEXT - 2
    assert lm.score([1, 2]).shape == (2, VOCAB)
    assert lm.length == lm.context_length


def test_misuse_is_a_value_error(shared_model):
    lm = OnnxCausalLM(shared_model)
    lm.prefill([1, 2])
    for length in (3, -1):
        with pytest.raises(ValueError, match="rewind"):
            lm.rewind(length)
    with pytest.raises(ValueError, match="nothing to score"):
        lm.score([])
    lm.prefill([])
    assert lm.length == 2


@pytest.mark.parametrize(
    ("variant", "settings", "message"),
    [
        (SHARED, {"context_length": 32}, "cache of 64 tokens, the manifest says 32"),
        (SHARED, {"cache": "concat"}, "fixed length"),
        (SHARED, {"vocab_size": NUM_LOGITS + 1}, "49 ids but the graph gives 48"),
        (Variant(has_gqa=False, inputs=("token_type_ids",)), {}, "token_type_ids"),
    ],
)
def test_a_graph_that_does_not_match_is_refused(tmp_path, variant, settings, message):
    with pytest.raises(BundleError, match=message):
        open_model(tmp_path, variant, **settings)


def test_a_missing_or_damaged_graph_and_no_threads_are_one_line_each(tmp_path):
    sizes = {"context_length": 8, "vocab_size": 8, "num_logits": 8}
    with pytest.raises(BundleError, match=r"none\.onnx is missing"):
        OnnxModel.open(tmp_path / "none.onnx", **sizes)
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"bad\.onnx cannot be opened") as caught:
        OnnxModel.open(tmp_path / "bad.onnx", **sizes)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="threads is 0"):
        open_model(tmp_path, SHARED, threads=0)


def test_the_provider_is_named(shared_model):
    assert shared_model.provider == "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("name", "element", "shape", "message"),
    [
        ("input_ids", onnx.TensorProto.FLOAT, None, "wants input_ids as"),
        ("attention_mask", None, [1], "wants attention_mask as"),
        ("past_key_values.0.key", None, [1, 2], "which is no cache"),
        ("past_key_values.0.key", onnx.TensorProto.INT64, None, "which is no cache"),
        ("past_key_values.0.key", None, [1, 2**40, 64, 16], "leaves the shape"),
        ("present.0.key", onnx.TensorProto.FLOAT16, None, "of another kind"),
        ("logits", onnx.TensorProto.INT64, None, "gives logits as"),
        ("logits", None, [1], "gives logits as"),
        ("hidden_states", None, [1, "n", "width"], "gives hidden_states as"),
        ("lora.layers.0.q_proj.A", None, ["n", 2], "no factor of an adapter"),
        ("lora.layers.0.q_proj.A", onnx.TensorProto.FLOAT16, None, "no factor of an adapter"),
    ],
)
def test_what_a_graph_takes_and_gives_is_checked_before_buffers_are_made(
    name, element, shape, message
):
    """The right hash and another graph ended in a traceback of numpy or onnxruntime."""
    kinds = {1: "tensor(float)", 7: "tensor(int64)", 10: "tensor(float16)"}

    def node(node_name, kind, dims):
        if node_name == name:
            kind, dims = kinds.get(element, kind), shape or dims
        return SimpleNamespace(name=node_name, type=kind, shape=dims)

    session = SimpleNamespace(
        get_inputs=lambda: [
            node("input_ids", kinds[7], [1, "n"]),
            node("attention_mask", kinds[7], [1, "total"]),
            node("past_key_values.0.key", kinds[1], [1, 2, 64, 16]),
            node("lora.layers.0.q_proj.A", kinds[1], [32, 2]),
        ],
        get_outputs=lambda: [
            node("logits", kinds[1], [1, "n", NUM_LOGITS]),
            node("present.0.key", kinds[1], [1, 2, 64, 16]),
            node("hidden_states", kinds[1], [1, "n", 32]),
        ],
        get_overridable_initializers=list,
    )
    with pytest.raises(BundleError, match=message):
        read_signature(session, Path("model.onnx"), context_length=64, num_logits=NUM_LOGITS)
