"""Spellings spell exactly, and the trie holds each token on exactly one path."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import encoder, vocabulary
from toy_vocabularies import toy_encoder

from omnidraft_npu.bridge.spelling import (
    Spellings,
    direct_spellings,
    end_aliases,
    end_pieces,
    full_spellings,
)
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import END_ROLES, Role
from omnidraft_npu.errors import BundleError
from omnidraft_npu.proposal import ROOT

PAIRS = [
    (drafter, target)
    for drafter in ("llama2", "smollm2", "qwen3")
    for target in ("llama2", "smollm2", "qwen3")
    if drafter != target
] + [("smollm2", "gemma3"), ("llama2", "llama3")]


@functools.cache
def real_spellings(drafter, target):
    return full_spellings(encoder(drafter), vocabulary(target))


def runs_of(spellings):
    cuts = spellings.offsets[1:-1]
    parts = [part.tolist() for part in np.split(spellings.pieces, cuts)]
    return dict(zip(spellings.token_ids.tolist(), parts, strict=True))


def walk_to(trie, run):
    node = ROOT
    for piece in run:
        pieces, nodes = trie.children(node)
        at = int(np.searchsorted(pieces, piece))
        assert pieces[at] == piece
        node = int(nodes[at])
    return node


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_every_spelling_of_a_whole_vocabulary_spells_its_token(drafter, target):
    pieces, tokens = vocabulary(drafter).all_bytes(), vocabulary(target).all_bytes()
    runs = runs_of(real_spellings(drafter, target))
    ends = end_pieces(vocabulary(drafter), vocabulary(target))
    for token_id, run in runs.items():
        if token_id in ends:
            assert run == [ends[token_id]]
        else:
            assert b"".join([pieces[piece] for piece in run]) == tokens[token_id] != b""
    # All but tokens with a byte that the drafter does not have at all.
    missing = {i for i, token in enumerate(tokens) if token} - runs.keys()
    known = set(b"".join(pieces))
    assert all(set(tokens[i]) - known for i in missing)
    assert len(missing) <= 30


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_only_text_and_ends_of_a_response_are_mapped(drafter, target):
    spellings = real_spellings(drafter, target)
    roles = vocabulary(target).roles[spellings.token_ids]
    assert set(roles.tolist()) <= {Role.TEXT, *END_ROLES}
    piece_roles = vocabulary(drafter).roles[spellings.pieces]
    assert set(piece_roles.tolist()) <= {Role.TEXT, *END_ROLES}


def test_the_trie_of_152k_tokens_is_small():
    target = vocabulary("qwen3")
    trie = SpellingTrie.build(real_spellings("smollm2", "qwen3"), target.size)
    assert trie.nbytes < 16e6


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    is_direct=st.booleans(),
)
def test_each_token_ends_at_the_end_of_its_own_path(seed, sizes, is_direct):
    rng = np.random.default_rng(seed)
    drafter, target = (toy_encoder(rng, size, num_padding=2) for size in sizes)
    spellings = (
        direct_spellings(drafter.vocabulary, target.vocabulary)
        if is_direct
        else full_spellings(drafter, target.vocabulary)
    )
    trie = SpellingTrie.build(spellings, target.vocabulary.size)
    runs = runs_of(spellings)

    assert sorted(trie.token_ids.tolist()) == sorted(runs)
    below = {node: set() for node in range(trie.num_nodes)}
    for token_id, run in runs.items():
        node = walk_to(trie, run)
        assert trie.token_nodes[token_id] == node
        assert token_id in trie.tokens(node)
        for length in range(len(run) + 1):
            below[walk_to(trie, run[:length])].add(token_id)
    for node, token_ids in below.items():
        assert set(trie.subtree_tokens(node).tolist()) == token_ids
        pieces, nodes = trie.children(node)
        assert (np.diff(pieces) > 0).all()
        assert (nodes > node).all()
        assert (nodes < trie.subtree_ends[node]).all()
    unmapped = set(range(target.vocabulary.size)) - runs.keys()
    assert {0, 1, *range(target.vocabulary.size - 2, target.vocabulary.size)} <= unmapped
    assert (trie.token_nodes[sorted(unmapped)] == -1).all()


def test_tokens_with_equal_bytes_end_at_one_node_the_preferred_one_first():
    target = vocabulary("llama2")
    trie = SpellingTrie.build(real_spellings("smollm2", "llama2"), target.size)
    text_id = target.by_bytes[b"A"]
    byte_id = 3 + ord("A")
    assert trie.tokens(int(trie.token_nodes[byte_id])).tolist() == [text_id, byte_id]


def test_ends_of_a_response_are_matched_by_role_and_extra_pieces_stand_in():
    smollm, gemma, qwen = vocabulary("smollm2"), vocabulary("gemma3"), vocabulary("qwen3")
    assert end_pieces(smollm, gemma) == {1: 2, 106: 2}
    assert end_pieces(gemma, smollm) == {2: 106}
    assert end_aliases(gemma, smollm) == {1: 106}
    assert end_pieces(qwen, gemma) == {1: 151_643, 106: 151_645}
    trie = SpellingTrie.build(direct_spellings(smollm, gemma), gemma.size)
    assert trie.tokens(int(trie.token_nodes[1])).tolist() == [106, 1]


def test_a_trie_without_spellings_has_a_root():
    trie = SpellingTrie.build(Spellings.from_runs({}), 5)
    assert trie.num_nodes == 1
    assert len(trie.children(ROOT)[0]) == len(trie.tokens(ROOT)) == 0


@pytest.fixture
def saved(tmp_path, rng):
    drafter, target = toy_encoder(rng, 20), toy_encoder(rng, 20)
    trie = SpellingTrie.build(full_spellings(drafter, target.vocabulary), target.vocabulary.size)
    path = tmp_path / "full.safetensors"
    trie.save(path, drafter_sha256="aa", target_sha256="bb")
    return trie, path


def test_a_saved_trie_is_mapped_not_read(saved):
    trie, path = saved
    loaded = SpellingTrie.load(path, drafter_sha256="aa", target_sha256="bb")
    for name in vars(trie):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(trie, name))
        assert not getattr(loaded, name).flags.owndata
        assert not getattr(loaded, name).flags.writeable


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ({"drafter_sha256": "xx", "target_sha256": "bb"}, "drafter tokenizer .* aa, .* xx"),
        ({"drafter_sha256": "aa", "target_sha256": "yy"}, "target tokenizer .* bb, .* yy"),
    ],
)
def test_a_trie_of_other_tokenizers_is_refused_by_name(saved, hashes, message):
    with pytest.raises(BundleError, match=message):
        SpellingTrie.load(saved[1], **hashes)


@pytest.mark.parametrize("damage", ["cut", "short", "text", "gone", "empty"])
def test_a_damaged_trie_is_refused(saved, damage):
    path = saved[1]
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            {"cut": data[:-40], "short": data[:5], "text": b"hello world " * 9, "empty": b""}[
                damage
            ]
        )
    with pytest.raises(BundleError, match=r"full\.safetensors"):
        SpellingTrie.load(path, drafter_sha256="aa", target_sha256="bb")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("child_nodes", lambda a: a * 0),
        ("child_nodes", lambda a: a[::-1]),
        ("child_pieces", lambda a: a[::-1]),
        ("child_pieces", lambda a: a - 1000),
        ("child_offsets", lambda a: np.where(np.arange(len(a)) == 1, 2**31 - 1, a)),
        ("child_offsets", lambda a: a[:-1]),
        ("subtree_ends", lambda a: a + 1),
        ("token_offsets", lambda a: np.where(np.arange(len(a)) == 1, -(2**31), a)),
        ("token_ids", lambda a: a + 2**20),
        ("token_ids", lambda a: a * 0),
        ("token_nodes", lambda a: a[:3]),
        ("token_nodes", lambda a: a * 0 - 1),
        ("aliases", lambda a: a.reshape(-1)),
        ("aliases", lambda a: np.full((1, 2), -1)),
    ],
)
def test_a_trie_whose_arrays_do_not_fit_together_is_refused(saved, name, change):
    """They came as far as the walk, and were an IndexError in the middle of an answer."""
    trie, path = saved
    changed = dataclasses.replace(trie, **{name: change(getattr(trie, name)).astype(np.int32)})
    changed.save(path, drafter_sha256="aa", target_sha256="bb")
    with pytest.raises(BundleError, match=r"full\.safetensors is damaged"):
        SpellingTrie.load(path, drafter_sha256="aa", target_sha256="bb")


def test_a_trie_of_other_models_is_refused(saved):
    trie, _ = saved
    pieces, targets = int(trie.child_pieces.max()) + 1, len(trie.token_nodes)
    trie.check_sizes(num_pieces=pieces, num_targets=targets)
    for sizes in ((pieces - 1, targets), (pieces, targets + 1), (pieces, targets - 1)):
        with pytest.raises(BundleError, match="for other models"):
            trie.check_sizes(num_pieces=sizes[0], num_targets=sizes[1])
