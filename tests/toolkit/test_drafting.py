"""Drafting through the bridge keeps the target's output and follows its context."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel
from toy_vocabularies import toy_document, toy_encoder

from omnidraft_npu.bridge.following import ByteBridge, IdentityBridge
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import direct_spellings, full_spellings
from omnidraft_npu.bridge.text_walk import TextWalk
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import END_ROLES, Vocabulary
from omnidraft_npu.bridge.walk import PlainWalk, TrieWalk
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.speculative import generate


def make_drafter(model, encoder, target, mode="full"):
    """Drafts `model` for the vocabulary of an encoder of the target."""
    spell = direct_spellings if mode == "direct" else full_spellings
    spellings = spell(encoder.vocabulary if mode == "direct" else encoder, target.vocabulary)
    bridge = ByteBridge(encoder, target.vocabulary)
    walk = TrieWalk(SpellingTrie.build(spellings, target.vocabulary.size), model.vocab_size)
    ends = frozenset(target.vocabulary.special_ids(*END_ROLES))
    text = TextWalk(encoder.vocabulary, target) if mode == "text" else None
    return ModelDrafter(model, bridge, text or walk, end_token_ids=ends)


def decode(proposer, model, prompt, **options):
    model.rewind(0)
    config = DecodeConfig(max_new_tokens=40, stop_token_ids=frozenset({2}), **options)
    rounds = list(generate(proposer, model, prompt, config))
    return [i for r in rounds for i in r.verdict.token_ids], rounds


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    k=st.integers(1, 8),
    has_bos=st.booleans(),
    mode=st.sampled_from(["full", "direct", "text"]),
    context_length=st.sampled_from([2, 3, 9, 30, 4096]),
)
def test_speculative_greedy_is_plain_greedy_for_any_pair_of_vocabularies(
    seed, sizes, k, has_bos, mode, context_length
):
    rng = np.random.default_rng(seed)
    drafter = toy_encoder(rng, sizes[0], num_padding=2, has_bos=has_bos)
    target = toy_encoder(rng, sizes[1], num_padding=3)
    vocab_size = target.vocabulary.size
    drafter_model = MarkovModel(
        rng.normal(size=(drafter.vocabulary.size,) * 2), context_length=context_length, history=3
    )
    target_model = MarkovModel(rng.normal(size=(vocab_size,) * 2), history=2)
    proposer = make_drafter(drafter_model, drafter, target, mode)
    for length in (9, 1, 4):  # a shorter prompt after a longer one sees nothing of it
        prompt = [1, *rng.integers(3, vocab_size, length - 1).tolist()]
        plain, _ = decode(None, target_model, prompt)
        drafted, rounds = decode(proposer, target_model, prompt, max_draft_tokens=k)
        assert drafted == plain
        fresh = make_drafter(
            MarkovModel(drafter_model.table, context_length=context_length, history=3),
            drafter,
            target,
            mode,
        )
        _, fresh_rounds = decode(fresh, target_model, prompt, max_draft_tokens=k)
        assert [r.verdict for r in rounds] == [r.verdict for r in fresh_rounds]


@pytest.mark.parametrize("k", range(1, 9))
def test_a_drafter_equal_to_the_target_is_always_accepted(rng, k):
    table = rng.normal(size=(30, 30))
    drafter_model, target_model = MarkovModel(table, history=4), MarkovModel(table, history=4)
    proposer = ModelDrafter(drafter_model, IdentityBridge(30), PlainWalk(30))
    for length in (7, 1, 3):
        prompt = rng.integers(3, 30, length).tolist()
        plain, _ = decode(None, target_model, prompt)
        drafted, rounds = decode(proposer, target_model, prompt, max_draft_tokens=k)
        assert drafted == plain
        assert [len(r.verdict.token_ids) for r in rounds[:-1]] == [k + 1] * (len(rounds) - 1)
        assert all(r.verdict.num_accepted == r.verdict.num_tested for r in rounds)


def test_the_cache_holds_the_context_and_is_fed_each_piece_about_once(rng):
    drafter, encoder = toy_encoder(rng, 30), toy_encoder(rng, 30)
    target = encoder.vocabulary
    model = MarkovModel(rng.normal(size=(drafter.vocabulary.size,) * 2), history=3)
    target_model = MarkovModel(rng.normal(size=(target.size,) * 2), history=3)
    proposer = make_drafter(model, drafter, encoder)
    context = rng.integers(3, target.size, 300).tolist()
    config = DecodeConfig(max_new_tokens=60, max_draft_tokens=4)
    for one in generate(proposer, target_model, list(context), config):
        context += one.verdict.token_ids
        proposer.propose(1)
        data = b"".join(target.token_bytes(i) for i in context)
        assert model.cache == [1, *drafter.encode(data)[0]]
    assert model.num_fed < 300 * 8 / 2 + 60 * 30  # prompt once, then a few pieces a round


def test_a_context_that_outgrows_the_drafter_is_followed_in_its_later_half(rng):
    drafter, encoder = toy_encoder(rng, 30), toy_encoder(rng, 30)
    target = encoder.vocabulary
    model = MarkovModel(
        rng.normal(size=(drafter.vocabulary.size,) * 2), context_length=60, history=3
    )
    target_model = MarkovModel(rng.normal(size=(target.size,) * 2), history=3)
    proposer = make_drafter(model, drafter, encoder)
    context = rng.integers(3, target.size, 100).tolist()
    num_empty = num_long_feeds = 0
    config = DecodeConfig(max_new_tokens=200, max_draft_tokens=4)
    for one in generate(proposer, target_model, list(context), config):
        context += one.verdict.token_ids
        num_empty += one.num_proposed == 0
        before = model.num_fed
        proposer.propose(1)
        num_long_feeds += model.num_fed - before > 20
        data = b"".join(target.token_bytes(i) for i in context)
        assert model.cache[0] == 1
        assert len(model.cache) >= 30
        pieces = drafter.encode(data)[0]
        assert model.cache[1:] == pieces[len(pieces) - len(model.cache) + 1 :]
    assert num_empty < 20
    assert num_long_feeds < 15


def test_pieces_that_merge_before_the_window_do_not_leave_it_empty():
    document = toy_document(np.random.default_rng(0), 0)
    document["model"]["vocab"] |= {"ab": 7, "abab": 8, "abababab": 9}
    document["model"]["merges"] = [["a", "b"], ["ab", "ab"], ["abab", "abab"]]
    vocab = Vocabulary.from_tokenizer_json(document, eos_token_ids=(2,), bos_token_id=1)
    a, b = vocab.by_bytes[b"a"], vocab.by_bytes[b"b"]
    model = MarkovModel(np.zeros((vocab.size, vocab.size)), context_length=3)
    encoder = PieceEncoder(document, vocab)
    proposer = make_drafter(model, encoder, encoder)
    proposer.begin([1, a, b, a, b, a, b, a])  # abab ab a, of which the window holds the last
    assert model.cache == [1]
    proposer.observe([b])
    proposer.propose(1)
    assert model.cache == [1, 9]


def test_a_context_that_grows_again_after_a_shorter_one_starts_afresh(rng):
    drafter, encoder = toy_encoder(rng, 30), toy_encoder(rng, 30)
    target = encoder.vocabulary
    model = MarkovModel(rng.normal(size=(drafter.vocabulary.size,) * 2), context_length=40)
    proposer = make_drafter(model, drafter, encoder)
    long, short = rng.integers(3, target.size, 90).tolist(), [5, 4]
    proposer.begin(long)
    proposer.propose(4)
    proposer.begin(short)
    proposer.propose(1)
    data = b"".join(target.token_bytes(i) for i in short)
    assert model.cache == [1, *drafter.encode(data)[0]]


@pytest.mark.parametrize("mode", ["full", "text"])
def test_drafting_stops_after_an_end_of_response(rng, mode):
    drafter, target = toy_encoder(rng, 10), toy_encoder(rng, 10)
    table = np.zeros((drafter.vocabulary.size,) * 2)
    table[:, 2] = 1.0  # the drafter always ends the response
    proposer = make_drafter(MarkovModel(table), drafter, target, mode)
    proposer.begin([1, 4])
    assert proposer.propose(8).token_ids == (2,)


@pytest.mark.parametrize("mode", ["full", "text"])
def test_an_empty_context_gives_no_draft(rng, mode):
    drafter, target = toy_encoder(rng, 10, has_bos=False), toy_encoder(rng, 10)
    table = np.zeros((drafter.vocabulary.size,) * 2)
    table[:, 5] = 1.0
    proposer = make_drafter(MarkovModel(table), drafter, target, mode)
    proposer.begin([1])  # the target's BOS is nothing to the drafter
    assert proposer.propose(4).token_ids == ()
    proposer.observe([5])
    assert proposer.propose(4).token_ids != ()


def test_time_in_the_model_is_part_of_the_proposal(rng):
    proposer = ModelDrafter(MarkovModel(rng.normal(size=(9, 9))), IdentityBridge(9), PlainWalk(9))
    proposer.begin([4])
    assert 0 < proposer.propose(3).model_s < 1
