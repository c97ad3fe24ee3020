"""What makes passes exact is found by trying on the machine at hand, and remembered."""

import json
import logging
from dataclasses import replace
from platform import machine

import numpy as np
import onnx
import pytest
from decoder_graphs import NUM_LOGITS, OPTIMUM, SHARED, VOCAB, write_decoder

from omnidraft_npu.runtime import attention_probe, exact_search
from omnidraft_npu.runtime.attention_probe import attention_rule
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel
from omnidraft_npu.runtime.exact_passes import ExactRule, Pass

FLOAT = np.dtype(np.float32)


def opened(folder, variant=SHARED):
    return OnnxModel.open(
        write_decoder(folder / "model.onnx", variant),
        context_length=variant.context_length,
        vocab_size=VOCAB,
        num_logits=NUM_LOGITS,
        threads=1,
    )


@pytest.fixture
def store(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    monkeypatch.setattr(exact_search, "store_folder", lambda: folder)
    return folder / "exact"


ODD_BLOCKS = pytest.mark.xfail(
    machine() == "aarch64",
    strict=True,
    reason="blocks of 170 keys are no multiple of the 4 that are summed at once",
)


@pytest.mark.parametrize(
    "head_dim", [16, 64, 80, 128, pytest.param(192, marks=ODD_BLOCKS), 256, 512]
)
def test_a_rule_is_found_for_heads_of_every_size(head_dim):
    assert attention_rule(head_dim, FLOAT) is not None


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_rule_holds_where_it_was_not_tried(head_dim):
    rule = attention_rule(head_dim, FLOAT)
    probe = attention_probe._Probe(head_dim, FLOAT)
    assert probe.agrees(rule, range(300, 480), (8, 1, 4, 7, 33, 150))


@pytest.mark.parametrize(
    "dtype, head_dim", [(np.int64, 64), (np.float32, 24)], ids=["dtype", "size"]
)
def test_heads_that_the_operator_does_not_take_have_no_rule(dtype, head_dim):
    assert attention_rule(head_dim, np.dtype(dtype)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_operators_graph_is_valid(dtype):
    data = attention_probe._attention_graph(np.dtype(dtype))
    onnx.checker.check_model(onnx.load_from_string(data))


class ScriptedProbe:
    """Attention of a processor that sums keys by eights and by blocks of 96, from 144 on."""

    def __init__(self, head_dim, dtype):
        self._size = 4000

    agrees = attention_probe._Probe.agrees
    cuts = attention_probe._Probe.cuts
    _cut = attention_probe._Probe._cut
    _rows = attention_probe._Probe._rows

    def attend(self, start, one):
        def bits(position):
            alone = position == one.total - 1 and (one.total - start) % 48 == 1
            fills = one.total >= (position // 8 + 1) * 8
            return position, alone, fills, max(0, (one.total - 49) // 96)

        return np.array([bits(start + i) for i in range(one.num_tokens)])


def test_the_rule_of_a_processor_not_seen_before_is_found(monkeypatch):
    monkeypatch.setattr(attention_probe, "_Probe", ScriptedProbe)
    rule = attention_rule.__wrapped__(256, FLOAT)
    assert rule == ExactRule(min_rows=2, key_multiple=8, first_cut=144, cut_every=96)


def test_what_was_found_is_remembered_by_graph(tmp_path, store, monkeypatch):
    found = opened(tmp_path).exact_rule
    (file,) = store.iterdir()
    assert json.loads(file.read_text())["holds"] is True
    monkeypatch.setattr(exact_search, "_find_rule", lambda model: pytest.fail("tried again"))
    assert opened(tmp_path).exact_rule == found


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: text.replace("true", "1"),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"min_rows": 2', '"min_rows": 0'),
        lambda text: "[]",
        lambda text: "",
    ],
    ids=["cut", "type", "version", "range", "list", "empty"],
)
def test_a_damaged_memory_is_found_again(tmp_path, store, damage):
    found = opened(tmp_path).exact_rule
    (file,) = store.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    assert opened(tmp_path).exact_rule == found
    assert file.read_text() == whole


def test_another_version_of_onnxruntime_is_tried_again(tmp_path, store, monkeypatch):
    rule = opened(tmp_path).exact_rule
    machine = exact_search._machine()
    monkeypatch.setattr(exact_search, "_machine", lambda: ["99", *machine[1:]])
    assert opened(tmp_path).exact_rule == rule
    assert len(list(store.iterdir())) == 2


def test_a_store_that_cannot_be_written_does_not_stop_an_answer(tmp_path, store):
    store.parent.write_text("a file")
    assert opened(tmp_path).exact_rule.holds


@pytest.mark.parametrize("rule", [ExactRule(), None], ids=["wrong", "none"])
def test_a_machine_where_nothing_holds_is_reported_once(tmp_path, store, monkeypatch, caplog, rule):
    monkeypatch.setattr(exact_search, "attention_rule", lambda head_dim, dtype: rule)
    monkeypatch.setattr(exact_search, "_agrees", lambda model, rule: False)
    model = opened(tmp_path)
    with caplog.at_level(logging.WARNING):
        model.begin()
        model.begin()
    assert model.has_near_ties
    assert [r.getMessage().endswith("exact but for near-ties") for r in caplog.records] == [True]
    assert model.begin().score([1, 2, 3]).shape == (3, VOCAB)


def test_a_rule_that_the_whole_graph_contradicts_is_not_used(tmp_path, store, monkeypatch):
    """A row alone has other bits in attention, so no added rows cannot be right."""
    monkeypatch.setattr(exact_search, "attention_rule", lambda head_dim, dtype: ExactRule())
    rule = opened(tmp_path).exact_rule
    assert rule.holds and rule.min_rows == 2 and rule.whole_pass


def test_more_keys_are_tried_where_a_whole_graph_contradicts_its_attention(
    tmp_path, store, monkeypatch
):
    """On Arm two rows are never enough, and no others were tried."""
    monkeypatch.setattr(
        exact_search, "attention_rule", lambda head_dim, dtype: ExactRule(min_rows=2)
    )
    monkeypatch.setattr(exact_search, "_agrees", lambda model, rule: rule.key_multiple == 4)
    rule = opened(tmp_path).exact_rule
    assert rule == ExactRule(min_rows=2, key_multiple=4, whole_pass=True)


def test_a_cache_that_grows_gets_added_rows_too(tmp_path, store):
    """A graph of standard operators: whatever was found, tokens alone and together agree."""
    model = opened(tmp_path, OPTIMUM)
    if not model.exact_rule.holds:
        pytest.skip("no rule makes this graph exact on this machine")
    ids = [5, 9, 3, 17, 30, 2, 8, 11]
    lm = OnnxCausalLM(model)
    together = lm.score(ids).copy()
    lm.rewind(0)
    alone = np.concatenate([lm.score([token]).copy() for token in ids])
    np.testing.assert_array_equal(alone, together)


def test_rows_added_to_a_growing_cache_are_cut_off_again(tmp_path, store):
    model = opened(tmp_path, OPTIMUM)
    plain = OnnxCausalLM(model, is_exact=False)
    filled = OnnxCausalLM(model, rule=ExactRule(min_rows=2, key_multiple=4, whole_pass=True))
    for ids in ([5, 9, 3], [17], [30, 2]):
        np.testing.assert_allclose(filled.score(ids), plain.score(ids), atol=1e-5)
    assert filled.length == plain.length == 6


@pytest.mark.parametrize("head_dim, most", [(64, 500), (256, 900)])
def test_the_search_is_short(head_dim, most, monkeypatch):
    """Some 40 to 80 microseconds a pass, so that it takes 20 to 55 ms."""
    passes = []
    attend = attention_probe._Probe.attend
    monkeypatch.setattr(
        attention_probe._Probe,
        "attend",
        lambda probe, start, one: passes.append(one) or attend(probe, start, one),
    )
    assert attention_rule.__wrapped__(head_dim, FLOAT) is not None
    assert 100 < len(passes) < most + 100  # with what is spent on candidates that fail


def test_a_pass_is_what_the_probe_runs():
    """The probe's rows are those of the operator: the same whoever stands beside them."""
    probe = attention_probe._Probe(64, FLOAT)
    two = probe.attend(40, Pass(2, 42))
    np.testing.assert_array_equal(probe.attend(40, Pass(1, 42)), two[:1])
    assert replace(ExactRule(), holds=False) != ExactRule()
