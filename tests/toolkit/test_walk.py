"""The walk draws only pieces that spell target tokens, and says how it drew them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_vocabularies import toy_encoder

from omnidraft_npu.bridge.spelling import Spellings, full_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.walk import PlainWalk, TrieWalk
from omnidraft_npu.config import SamplingConfig
from omnidraft_npu.proposal import ROOT, STOP, Visit
from omnidraft_npu.sampling import Draw

A, B, C, UNMAPPED, END, OTHER_END, INNER, D = range(8)
# Tokens: 10 = a, 11 = b, 12 = ab, 13 = cab, 14 ends the response, 15 = b and an
# inner piece that is no token by itself, 16 = d, 17 = dabc; nothing is spelled "c", "ca" or "da".
TOKENS = {10: [A], 11: [B], 12: [A, B], 13: [C, A, B], 14: [END], 15: [B, INNER]}
TOKENS |= {16: [D], 17: [D, A, B, C]}


@pytest.fixture
def trie():
    return SpellingTrie.build(Spellings.from_runs(TOKENS, {OTHER_END: END}), 20)


def logits(*pieces):
    """The first is the most likely, then the next; the rest are equal."""
    row = np.zeros(8, np.float32)
    row[list(pieces)] = np.arange(len(pieces), 0, -1)
    return row


def draw(trie, *rows):
    walk = TrieWalk(trie, 8)
    pieces = [walk.step(row) for row in rows]
    is_finished = walk.finish()
    return walk, pieces, is_finished


@pytest.mark.parametrize(
    ("rows", "pieces", "token_ids", "is_finished"),
    [
        ([logits(A), logits(B)], [A, B], [12], True),  # a child extends the run
        ([logits(A), logits(A), logits(B)], [A, A, B], [10, 12], True),  # another piece stops it
        ([logits(A), logits(C), logits(B)], [A, C, A], [10], False),  # "ca" is no token: dropped
        ([logits(D), logits(A), logits(B)], [D, A, B], [16, 12], False),  # "dab" is none: cut
        ([logits(C), logits(B), logits(C)], [C, A, B], [13], True),  # only children at "c", "ca"
        ([logits(A)], [A], [10], True),  # the budget ends where a token does
        ([logits(UNMAPPED, B)], [B], [11], True),  # never an unmapped piece
        ([logits(UNMAPPED)], [A], [10], True),  # the lowest piece of equal ones
        ([logits(OTHER_END)], [END], [14], True),  # a piece that stands for another
        ([logits(UNMAPPED, OTHER_END)], [END], [14], True),
        ([logits(A), logits(END)], [A, END], [10, 14], True),
        ([logits(B), logits(UNMAPPED, INNER)], [B, INNER], [15], True),  # a child, masked or not
        ([logits(A), logits(INNER, B)], [A, B], [12], True),  # only under its own parent
    ],
)
def test_pieces_become_tokens(trie, rows, pieces, token_ids, is_finished):
    walk, drawn, finished = draw(trie, *rows)
    assert drawn == pieces
    assert walk.token_ids == token_ids
    assert finished is is_finished


def test_the_walk_records_every_branching_and_none_at_leaves(trie):
    walk, _, _ = draw(trie, logits(A), logits(A), logits(B), logits(A))
    a, ab = (int(trie.token_nodes[i]) for i in (10, 12))
    extend, stop = Visit(node=a, branch=0), Visit(node=a, branch=STOP)
    start = Visit(node=ROOT, branch=0)
    assert walk.visits == [(start, stop), (start, extend), (start, stop)]
    assert not len(trie.children(ab)[0])


def test_a_logit_that_is_not_a_number_does_not_let_an_unmapped_piece_through(trie):
    row = logits(A)
    row[UNMAPPED] = np.nan
    walk, pieces, _ = draw(trie, row)
    assert (pieces, walk.token_ids) == ([A], [10])
    walk, pieces, _ = draw(trie, logits(A), row)
    assert (pieces, walk.token_ids) == ([A, A], [10, 10])


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_sampling_ends_the_round_where_logits_are_not_numbers(trie, rng, options):
    draw = Draw(sampling=SamplingConfig(temperature=1.0, **options), rng=rng)
    broken = np.full(8, np.nan, np.float32)
    for walk in (TrieWalk(trie, 8), PlainWalk(8)):
        assert walk.step(broken, draw) is None
        assert walk.token_ids == []
    empty = TrieWalk(SpellingTrie.build(Spellings.from_runs({}), 5), 8)
    assert empty.step(logits(A), draw) is None


@pytest.mark.parametrize("mask", [-np.inf, -1e4])
def test_sampling_draws_allowed_pieces_only(trie, rng, mask):
    draw = Draw(sampling=SamplingConfig(temperature=0.01), rng=rng)
    row = np.full(8, mask, np.float32)
    row[[A, UNMAPPED, OTHER_END]] = [0.0, 90.0, 0.0]  # far above all that may be drawn
    seen = set()
    for _ in range(50):
        walk = TrieWalk(trie, 8)
        seen.add(walk.step(row, draw))
        walk.finish()
        assert walk.token_ids in ([10], [14])
    assert seen == {A, END}


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_law_that_is_told_is_the_one_that_branches_were_drawn_by(trie, rng, options):
    """At the root: softmax over what begins a token, aliases added to what they stand for."""
    draw = Draw(sampling=SamplingConfig(temperature=1.0, **options), rng=rng)
    row = np.array([0.0, -1.0, -1.5, 9.0, -0.5, -0.3, 9.0, -13.0], np.float32)
    walk = TrieWalk(trie, 8)
    counts = np.zeros(6)
    for _ in range(3000):
        walk.begin()
        walk.step(row, draw)
        visit = walk.visits[0][0]
        law = visit.branch_probs
        assert law.sum() == pytest.approx(1)
        assert law[visit.branch] == pytest.approx(visit.branch_prob)
        counts[visit.branch] += 1
    np.testing.assert_allclose(counts / 3000, law, atol=0.05)
    starts = trie.children(ROOT)[0].tolist()
    assert law[-1] == 0
    if options:
        assert law[starts.index(D)] == 0  # far below the others
    else:
        ends = np.exp(-0.5) + np.exp(-0.3)
        whole = 1 + np.exp(-1) + np.exp(-1.5) + ends
        assert law[starts.index(END)] == pytest.approx(ends / whole)


def test_nothing_is_drawn_from_a_trie_without_tokens():
    walk, pieces, _ = draw(SpellingTrie.build(Spellings.from_runs({}), 5), logits(A))
    assert (pieces, walk.token_ids) == ([None], [])


def test_a_trie_with_more_pieces_than_the_drafter_is_refused(trie):
    with pytest.raises(ValueError, match="piece 7, the drafter has 4"):
        TrieWalk(trie, 4)


def test_plain_walk_draws_shared_ids_only():
    walk = PlainWalk(3)
    assert walk.step(np.array([0, 2, 2, 9], np.float32)) == 1
    assert walk.token_ids == [1]


def slow_walk(trie, rows):
    """The rule of the trie, written plainly: allowed = children, and root pieces at a token."""
    starts = children_of(trie, ROOT)
    token_ids, node, run = [], ROOT, []
    for row in rows:
        children = children_of(trie, node)
        allowed = set(children)
        if node == ROOT or len(trie.tokens(node)):
            allowed |= set(starts)
        piece = min(allowed, key=lambda p: (-row[p], p))
        if piece not in children:
            token_ids.append(int(trie.tokens(node)[0]))
            node, run = ROOT, []
        node = children_of(trie, node)[piece]
        run.append(piece)
        if not children_of(trie, node):
            token_ids.append(int(trie.tokens(node)[0]))
            node, run = ROOT, []
    while run:  # the longest token that the rest begins with
        for end in range(len(run), 0, -1):
            node = ROOT
            for piece in run[:end]:
                node = children_of(trie, node).get(piece, -1) if node >= 0 else -1
            if node >= 0 and len(trie.tokens(node)):
                token_ids.append(int(trie.tokens(node)[0]))
                run = run[end:]
                break
        else:
            break
    return token_ids


def children_of(trie, node):
    return dict(zip(*(part.tolist() for part in trie.children(node)), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    k=st.integers(1, 8),
)
def test_the_fast_walk_is_the_plain_rule(seed, sizes, k):
    rng = np.random.default_rng(seed)
    drafter, target = (toy_encoder(rng, size, num_padding=3) for size in sizes)
    spellings = full_spellings(drafter, target.vocabulary)
    trie = SpellingTrie.build(spellings, target.vocabulary.size)
    rows = rng.integers(0, 6, (k, drafter.vocabulary.size)).astype(np.float32)  # many ties
    walk = TrieWalk(trie, drafter.vocabulary.size)
    for _ in range(2):
        walk.begin()
        for row in rows:
            walk.step(row)
        walk.finish()
        assert walk.token_ids == slow_walk(trie, rows)
        assert len(walk.token_ids) <= len(walk.visits) <= k
        assert not target.vocabulary.is_special[[i for i in walk.token_ids if i != 2]].any()
