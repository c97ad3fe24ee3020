"""A token's logits and cache have the same bits however the passes that computed them were cut."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import save_tiny_model
from tiny_models import ARCHITECTURES

from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel
from omnidraft_npu.runtime.exact_passes import NOT_EXACT, ExactRule

VOCAB = 160
CONTEXT = 256

RULES = st.builds(
    ExactRule,
    min_rows=st.just(2),
    key_multiple=st.sampled_from([1, 2, 4, 8]),
    first_cut=st.sampled_from([None, 32, 64]),
    cut_every=st.sampled_from([64, 128, 170]),
)


def passes_of(rule, start, num_tokens, context_length):
    while num_tokens:
        one = rule.next_pass(start, num_tokens, context_length)
        yield start, one
        start += one.num_tokens
        num_tokens -= one.num_tokens


def block(rule, total):
    return sum(cut < total for cut in range(rule.first_cut, 10**4, rule.cut_every))


@given(RULES, st.integers(0, 900), st.integers(1, 300), st.integers(0, 40))
def test_no_pass_breaks_its_rule(rule, start, num_tokens, spare):
    context_length = start + num_tokens + spare
    reached = start
    for at, one in passes_of(rule, start, num_tokens, context_length):
        rows = one.total - at + one.num_repeated
        assert at == reached and one.num_tokens >= 1
        assert at + one.num_tokens <= one.total <= context_length
        assert rows - one.num_repeated - one.num_tokens + one.num_repeated <= rule.max_added_rows
        assert one.total % rule.key_multiple == 0 or one.total == context_length
        assert rows % 16 != 1 or context_length == 1
        if rule.first_cut is not None:
            alone = [
                rule.next_pass(token, 1, context_length).total
                for token in range(at, at + one.num_tokens)
            ]
            assert {block(rule, total) for total in [*alone, one.total]} == {block(rule, one.total)}
        reached += one.num_tokens
    assert reached == start + num_tokens


def test_passes_that_need_not_be_exact_are_as_long_as_what_is_given():
    assert NOT_EXACT.next_pass(62, 17, 100) == (17, 79, 0)


def test_the_last_place_of_a_context_is_scored_with_the_token_before_it():
    """There is no room for a row behind it, and its bits must not be those of a lone row."""
    rule = ExactRule(min_rows=2, key_multiple=4)
    assert rule.next_pass(63, 1, 64) == (1, 64, 1)
    assert rule.next_pass(60, 1, 64) == (1, 64, 0)


def write_graph(
    folder: Path,
    architecture: str,
    precision: str,
    rows: bool = True,
    lora_rank: int = 0,
    **own,
) -> Path:
    checkpoint = folder / "checkpoint"
    save_tiny_model(
        checkpoint, architecture, vocab_size=VOCAB, max_position_embeddings=CONTEXT, **own
    )
    opened = open_checkpoint(checkpoint)
    options = CpuGraphOptions(
        precision=precision,
        context_length=CONTEXT,
        has_attention_rows=rows,
        lora_rank=lora_rank,
    )
    build_cpu_decoder(opened.config, opened.tensor, folder, options)
    return folder / "model.onnx"


def open_graph(path: Path, context_length: int = CONTEXT) -> OnnxModel:
    return OnnxModel.open(
        path,
        context_length=context_length,
        vocab_size=VOCAB,
        num_logits=VOCAB,
        cache="shared",
        threads=2,
    )


def scored(lm, token_ids, prefilled, length):
    """Logits of all but the prefilled tokens, which keep what the cache holds of them."""
    lm.prefill(token_ids[lm.length : prefilled])
    rows = []
    for start in range(prefilled, len(token_ids), length):
        rows.append(lm.score(token_ids[start : start + length]).copy())
    return np.concatenate(rows)


PRECISIONS = ["fp32", "int8", pytest.param("int4", marks=pytest.mark.slow)]
LAYERS = ["sliding_attention", "full_attention"]
# The sliding window of the tiny Gemma would hide all but a few keys.
HEADS = {
    "64": ("llama", {"head_dim": 64}),
    "128": ("qwen3", {"head_dim": 128}),
    "256": ("gemma3_text", {"head_dim": 256, "sliding_window": 200, "layer_types": LAYERS}),
}


@pytest.mark.parametrize("rows", [True, False], ids=["attention", "whole"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("heads", HEADS)
def test_logits_have_the_same_bits_for_every_pass_length(heads, precision, rows, tmp_path, rng):
    """With the input that adds rows to attention alone, and in a graph made before there was one.

    Up to the last place of the context, behind which there is no room for more rows.
    """
    architecture, own = HEADS[heads]
    path = write_graph(tmp_path, architecture, precision, rows, num_hidden_layers=2, **own)
    model = open_graph(path)
    assert model.exact_rule.holds
    assert model.exact_rule.whole_pass is not rows
    token_ids = rng.integers(3, VOCAB, CONTEXT).tolist()
    lm = OnnxCausalLM(model)
    alone = scored(lm, token_ids, 20, 1)
    rounds = [(20, 1 + num_drafts) for num_drafts in range(1, 9)]
    for prefilled, length in (*rounds, (1, 16), (149, 1), (255, 1)):
        lm.rewind(0)
        others = scored(lm, token_ids, prefilled, length)[max(0, 20 - prefilled) :]
        np.testing.assert_array_equal(others, alone[-len(others) :])


@pytest.mark.parametrize("rank", [4, 64])
def test_an_adapter_leaves_passes_exact(rank, tmp_path, rng):
    """Its products are of float32 and not packed, so a lone row may take another kernel."""
    path = write_graph(tmp_path, "llama", "int8", lora_rank=rank, head_dim=64)
    model = open_graph(path)
    assert model.exact_rule.holds
    shapes = model.lora_inputs.items()
    adapter = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes}
    lm = OnnxCausalLM(model)
    lm.set_lora(adapter)
    token_ids = rng.integers(3, VOCAB, 100).tolist()
    alone = scored(lm, token_ids, 20, 1)
    for length in (2, 3, 5, 8):
        lm.rewind(0)
        np.testing.assert_array_equal(scored(lm, token_ids, 20, length), alone)


def test_a_lone_row_of_attention_has_other_bits(tmp_path, rng):
    """Why rows are added at all; with another kernel this test and the rows may go."""
    model = open_graph(write_graph(tmp_path, "llama", "fp32", head_dim=64))
    token_ids = rng.integers(3, VOCAB, 100).tolist()
    lm = OnnxCausalLM(model, is_exact=False)
    together = scored(lm, token_ids, 20, 8)
    lm.rewind(0)
    assert (scored(lm, token_ids, 20, 1) != together).any()


TURNS = ((0, 70), (70, 200), (129, 130), (60, 61), (61, 250), (250, 250), (200, 66))
"""Tokens shared with the text, and those of the prompt: rising, falling and equal lengths."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kept_prefix_is_what_a_fresh_conversation_computes(
    architecture, precision, tmp_path, rng
):
    """Longer, shorter and equal prompts over one text, answered by single tokens and by rounds."""
    own = {"sliding_window": 200} if architecture == "gemma3_text" else {}
    model = open_graph(write_graph(tmp_path, architecture, precision, head_dim=256, **own))
    text = rng.integers(3, VOCAB, CONTEXT).tolist()
    kept = OnnxCausalLM(model)
    for turn, (shared, length) in enumerate(TURNS):
        own_words = rng.integers(3, VOCAB, 300).tolist()
        prompt = [*(text[:shared] + own_words)[: length - 1], 3]
        common = 0
        while common < min(kept.length, length - 1) and kept.token_ids[common] == prompt[common]:
            common += 1
        kept.rewind(common)
        prefilled = max(common, length - 1 - 5 * (turn % 2))
        found = scored(kept, prompt, prefilled, 1 + turn)
        fresh = scored(OnnxCausalLM(model), prompt, length - 1, 1)
        np.testing.assert_array_equal(found[-1:], fresh)


def test_a_prompt_of_one_token_more_than_a_tile_is_prefilled_as_it_is_scored(tmp_path, rng):
    """Attention takes rows by tiles, and a row alone in the last one has other bits."""
    model = open_graph(write_graph(tmp_path, "llama", "fp32", head_dim=64))
    token_ids = rng.integers(3, VOCAB, 140).tolist()
    at_once, apart = OnnxCausalLM(model), OnnxCausalLM(model)
    at_once.prefill(token_ids[:129])
    apart.prefill(token_ids[:64])
    apart.prefill(token_ids[64:129])
    np.testing.assert_array_equal(
        at_once.score(token_ids[129:]).copy(), apart.score(token_ids[129:])
    )


def test_added_rows_leave_other_logits_and_hidden_states_alone(tmp_path, rng):
    """The graph itself: one to five rows more give the same rows, and no more of them."""
    import onnxruntime as ort

    path = write_graph(tmp_path, "qwen3", "fp32", head_dim=64)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    ids = rng.integers(3, VOCAB, (1, 3))
    found = []
    for rows in (None, 1, 3, 4, 8):
        total = max(3, rows or 0)
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, total), np.int64)}
        feeds |= {name: np.zeros((1, 2, 0, 64), np.float32) for name in names}
        if rows:
            feeds["attention_rows"] = np.array([rows])
        found.append(session.run(["logits"], feeds)[0])
        assert found[-1].shape == (1, 3, VOCAB)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-4)


def test_a_drafters_graph_has_no_rows_to_add(tmp_path):
    path = write_graph(tmp_path, "llama", "fp32", rows=False)
    graph = onnx.load(path, load_external_data=False).graph
    assert "attention_rows" not in {value.name for value in graph.input}
    assert not {"Gather", "Range"} & {n.op_type for n in graph.node if "attended" in n.name}
