"""The n-gram cache learns what is emitted, keeps its budget, and never changes a text."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel
from ngram_rows import make_entries
from toy_vocabularies import toy_encoder

from omnidraft_npu.bridge.following import ByteBridge
from omnidraft_npu.bridge.ngram_cache import NgramCache
from omnidraft_npu.bridge.spelling import Spellings, direct_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.cached_drafting import CachedDrafter
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.speculative import generate


def make_cache(encoder, target, **options):
    return NgramCache(encoder, target, direct_spellings(encoder.vocabulary, target), **options)


@pytest.fixture
def hard_pair(rng):
    """A drafter of single bytes, so that every longer token is an n-gram."""
    return toy_encoder(rng, 0), toy_encoder(rng, 40).vocabulary


def ngrams_of(target):
    return [i for i in range(3, target.size) if target.lengths[i] >= 2]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 15), st.integers(0, 40)),
    k=st.integers(1, 8),
    max_bytes=st.sampled_from([0, 40, 100, 1_000_000]),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_cache_that_changes_every_round_changes_no_token(seed, sizes, k, max_bytes, temperature):
    rng = np.random.default_rng(seed)
    encoder = toy_encoder(rng, sizes[0], num_padding=2)
    target = toy_encoder(rng, sizes[1], num_padding=3).vocabulary
    size = encoder.vocabulary.size
    cache = make_cache(encoder, target, max_bytes=max_bytes)
    drafter = CachedDrafter(
        MarkovModel(rng.normal(size=(size, size)), history=3),
        ByteBridge(encoder, target),
        cache,
        num_pieces=size,
    )
    model = MarkovModel(rng.normal(size=(target.size,) * 2), history=2)
    sampling = SamplingConfig(temperature=temperature, seed=seed)
    config = DecodeConfig(max_new_tokens=40, max_draft_tokens=k, sampling=sampling)
    for length in (9, 1, 4):
        prompt = [1, *rng.integers(3, target.size, length - 1).tolist()]
        texts = []
        for proposer in (None, drafter):
            model.rewind(0)
            text = []
            for one in generate(proposer, model, prompt, config):
                text += one.verdict.token_ids
                if proposer is not None:  # what no response would teach it, between rounds
                    drafter._ngrams.observe(rng.integers(3, target.size, 2).tolist())
                    drafter._trie_walk.use(cache.trie)
            texts.append(text)
        assert temperature > 0 or texts[0] == texts[1]
        assert len(texts[1]) == 40
        assert cache.entries().nbytes <= max_bytes


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 15), st.integers(0, 40)),
    max_bytes=st.sampled_from([60, 200, 1_000_000]),
)
def test_the_trie_is_the_direct_map_and_the_entries(seed, sizes, max_bytes):
    rng = np.random.default_rng(seed)
    encoder, target = (
        toy_encoder(rng, sizes[0]),
        toy_encoder(rng, sizes[1], num_padding=2).vocabulary,
    )
    direct = direct_spellings(encoder.vocabulary, target)
    cache = NgramCache(encoder, target, direct, max_bytes=max_bytes)
    for _ in range(10):
        cache.observe(rng.integers(0, target.size, 6).tolist())
        entries = cache.entries()
        runs = {
            i: [p] for i, p in zip(direct.token_ids.tolist(), direct.pieces.tolist(), strict=True)
        }
        for token_id, pieces, uses in entries:
            assert len(pieces) >= 2
            assert uses >= 1
            assert b"".join(map(encoder.vocabulary.token_bytes, pieces)) == target.token_bytes(
                token_id
            )
            assert token_id not in runs
            runs[token_id] = pieces
        aliases = dict(direct.aliases.tolist())
        built = SpellingTrie.build(Spellings.from_runs(runs, aliases), target.size)
        for field in dataclasses.fields(built):
            np.testing.assert_array_equal(
                getattr(cache.trie, field.name), getattr(built, field.name), err_msg=field.name
            )


def test_a_trie_in_use_never_changes(hard_pair):
    encoder, target = hard_pair
    cache = make_cache(encoder, target)
    trie = cache.trie
    before = {f.name: getattr(trie, f.name).copy() for f in dataclasses.fields(trie)}
    cache.observe(ngrams_of(target))
    assert cache.trie is not trie
    assert all((getattr(trie, name) == array).all() for name, array in before.items())


def test_what_was_emitted_is_drafted_from_then_on(hard_pair):
    encoder, target = hard_pair
    token_id = ngrams_of(target)[0]
    cache = make_cache(encoder, target)
    assert cache.trie.token_nodes[token_id] == -1
    cache.observe([token_id])
    assert cache.trie.tokens(int(cache.trie.token_nodes[token_id])).tolist() == [token_id]
    assert [(i, uses) for i, _, uses in cache.entries()] == [(token_id, 1)]


def test_the_drafter_proposes_what_it_has_learned_and_not_before(hard_pair):
    encoder, target = hard_pair
    token_id = next(i for i in ngrams_of(target) if target.lengths[i] == 2)
    (run,) = encoder.encode_batch([target.token_bytes(token_id)])
    table = np.zeros((encoder.vocabulary.size,) * 2)
    table[:, run[0]] = 1.0
    table[run[0], run[1]] = 2.0  # the drafter writes that token's bytes again and again
    drafter = CachedDrafter(
        MarkovModel(table),
        ByteBridge(encoder, target),
        make_cache(encoder, target),
        num_pieces=encoder.vocabulary.size,
    )
    drafter.begin([1, token_id])
    assert token_id not in drafter.propose(4).token_ids
    drafter.observe([token_id])
    proposal = drafter.propose(4)
    assert token_id in proposal.token_ids
    assert proposal.trie is drafter._ngrams.trie


def test_direct_and_special_tokens_are_no_entries(hard_pair):
    encoder, target = hard_pair
    cache = make_cache(encoder, target)
    direct = [i for i in range(target.size) if i not in ngrams_of(target)]
    cache.observe(direct)
    assert len(cache) == 0


def test_the_least_used_go_first_and_of_these_the_least_recently_used(hard_pair):
    encoder, target = hard_pair
    a, b, c, d, e = [i for i in ngrams_of(target) if target.lengths[i] == 2][:5]
    cache = make_cache(encoder, target, max_bytes=4 * 20)
    cache.observe([a, b, c, d, a, c, a])
    assert [i for i, _, _ in cache.entries()] == [b, d, c, a]
    cache.observe([b])  # as often as c, and later
    assert [i for i, _, _ in cache.entries()] == [d, c, b, a]
    cache.observe([e])  # too much: an eighth of the budget and what exceeds it is freed
    assert [(i, uses) for i, _, uses in cache.entries()] == [(c, 2), (b, 2), (a, 3)]
    assert cache.trie.token_nodes[[d, e]].tolist() == [-1, -1]
    cache.observe([e, e, e, e, e])
    assert [(i, uses) for i, _, uses in cache.entries()][-1] == (e, 5)


def test_what_is_fresh_is_taken_once_and_survives_eviction(hard_pair):
    encoder, target = hard_pair
    a, b, c = [i for i in ngrams_of(target) if target.lengths[i] == 2][:3]
    cache = make_cache(encoder, target, max_bytes=2 * 20 + 10)
    cache.observe([a, a, b])
    assert [(i, uses) for i, _, uses in cache.take_fresh()] == [(b, 1), (a, 2)]
    assert len(cache.take_fresh()) == 0
    cache.observe([a, c, c])
    assert [(i, uses) for i, _, uses in cache.take_fresh()] == [(a, 1), (c, 2)]
    assert [(i, uses) for i, _, uses in cache.entries()] == [(c, 2), (a, 3)]


def test_entries_from_elsewhere_join_and_wrong_ones_are_left_out(hard_pair):
    encoder, target = hard_pair
    a, b, c = ngrams_of(target)[:3]
    (run_a, run_b) = encoder.encode_batch([target.token_bytes(i) for i in (a, b)])
    cache = make_cache(encoder, target)
    cache.observe([a])
    cache.add(
        make_entries(
            (a, run_a, 4),
            (b, run_b, 2),
            (c, [3, 3, 3, 3, 3], 9),
            (3, [10**6, 4], 9),
            (10**6, run_a, 9),
        )
    )
    assert [(i, uses) for i, _, uses in cache.entries()] == [(b, 2), (a, 5)]
    assert [(i, uses) for i, _, uses in cache.take_fresh()] == [(a, 1)]


rows = st.dictionaries(
    st.integers(0, 9),
    st.tuples(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(1, 5)),
    max_size=8,
).map(lambda d: sorted(((i, *entry) for i, entry in d.items()), key=lambda row: row[2]))


@settings(max_examples=200, deadline=None)
@given(first=rows, second=rows, max_bytes=st.integers(0, 300))
def test_merging_adds_uses_and_pruning_keeps_the_most_used(first, second, max_bytes):
    merged = make_entries(*first).merged(make_entries(*second))
    expected = {i: [pieces, uses] for i, pieces, uses in first}
    for i, pieces, uses in second:
        expected[i] = [pieces, uses + expected.get(i, [0, 0])[1]]
    assert {i: [pieces, uses] for i, pieces, uses in merged} == expected
    assert (np.diff(merged.uses) >= 0).all()
    pruned = merged.pruned(max_bytes)
    kept = list(pruned)
    assert kept == list(merged)[len(merged) - len(kept) :]
    assert pruned.nbytes <= max_bytes
    if len(kept) < len(merged):
        _, pieces, _ = list(merged)[-len(kept) - 1]
        assert pruned.nbytes + 12 + 4 * len(pieces) > max_bytes


def test_counts_do_not_overflow():
    most = np.iinfo(np.int32).max
    merged = make_entries((1, [2, 3], most)).merged(make_entries((1, [2, 3], most)))
    assert list(merged) == [(1, [2, 3], most)]
