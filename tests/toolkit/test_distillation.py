"""The teacher's law over tokens, pushed into the drafter's pieces."""

import numpy as np
import pytest

from omnidraft_npu.bridge.spelling import Spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.distillation import TokenLaws, locate_pieces, piece_laws, spelling_paths

# Tokens 0 "a", 1 "ab", 2 "abc", 3 "b"; pieces 0 a, 1 b, 2 c.
RUNS = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [1]}
SPELLINGS = Spellings.from_runs(RUNS)
PATHS = spelling_paths(SPELLINGS, 4)
ALL = np.arange(4, dtype=np.int32)


def laws_of(token_ids, probs):
    """Full laws: every token is among the likeliest."""
    tokens = np.array(token_ids, np.int32)
    return TokenLaws(
        token_ids=tokens,
        top_ids=np.tile(ALL, (len(tokens), 1)),
        probs=np.array(probs, np.float32),
    )


def pushed(token_ids, probs, pieces):
    """``[pieces, 3]`` laws over the pieces."""
    laws = laws_of(token_ids, probs)
    lengths = [len(RUNS[i]) for i in token_ids]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens, depths = locate_pieces(
        PATHS, laws.token_ids, starts, np.array(pieces), np.arange(len(pieces))
    )
    found = piece_laws(laws, PATHS, np.array(pieces), tokens, depths, num_top=3)
    dense = np.zeros((len(pieces), 3), np.float32)
    np.add.at(dense, (np.arange(len(pieces))[:, None], found.ids), found.probs)
    return dense


def test_paths_are_the_spellings():
    np.testing.assert_array_equal(PATHS, [[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, -1, -1]])


def test_where_a_token_begins_the_law_is_the_mass_of_its_first_pieces():
    np.testing.assert_allclose(pushed([3], [[0.1, 0.2, 0.3, 0.4]], [1]), [[0.6, 0.4, 0]])


def test_first_and_inner_laws_are_the_branch_masses_of_the_trie(rng):
    """The same numbers as the walk that verifies proposals sums up."""
    law = rng.dirichlet(np.ones(4))
    trie = SpellingTrie.build(SPELLINGS, 4)
    dense = pushed([2], [law], [0, 1, 2])
    node = 0
    for depth, piece in enumerate([0, 1, 2]):
        pieces, nodes = trie.children(node)
        masses = [law[trie.subtree_tokens(v)].sum() for v in nodes]
        total = law[trie.subtree_tokens(node)].sum() if node else 1.0
        expected = np.zeros(3)
        expected[pieces] = np.array(masses) / total
        np.testing.assert_allclose(dense[depth], expected, atol=1e-6)
        node = nodes[list(pieces).index(piece)]


def test_inside_a_token_what_may_end_there_is_left_open():
    dense = pushed([1], [[0.3, 0.1, 0.2, 0.4]], [0, 1])
    np.testing.assert_allclose(dense[1], [0, 0.5, 0], atol=1e-6)


def test_a_token_that_could_have_gone_on_takes_its_share_of_the_next_law():
    """After "a" the target meant "ab" or longer in half of the cases."""
    first, second = [0.3, 0.1, 0.2, 0.4], [0.2, 0, 0, 0.8]
    dense = pushed([0, 3], [first, second], [0, 1])
    np.testing.assert_allclose(dense[0], [0.6, 0.4, 0], atol=1e-6)
    np.testing.assert_allclose(dense[1], [0.5 * 0.2, 0.5 + 0.5 * 0.8, 0], atol=1e-6)


def test_full_laws_sum_to_one_wherever_a_token_begins(rng):
    token_ids = [0, 3, 1, 0, 2]
    pieces = [piece for i in token_ids for piece in RUNS[i]]
    dense = pushed(token_ids, rng.dirichlet(np.ones(4), 5), pieces)
    begins = [0, 1, 2, 4, 5]
    np.testing.assert_allclose(dense[begins].sum(axis=1), 1, atol=1e-6)
    assert (dense.sum(axis=1) <= 1 + 1e-6).all()


def test_a_piece_across_two_tokens_is_its_own_law():
    """Text "ab" as tokens a, b but as one piece that spells neither."""
    laws = laws_of([0, 3], [[1, 0, 0, 0], [0, 0, 0, 1]])
    tokens, depths = locate_pieces(
        PATHS, laws.token_ids, np.array([0, 1]), np.array([2, 1]), np.array([0, 1])
    )
    np.testing.assert_array_equal(tokens, [0, 1])
    assert depths[0] == 0
    tokens, depths = locate_pieces(
        PATHS, np.array([2]), np.array([0]), np.array([1, 2]), np.array([0, 2])
    )
    assert depths[1] == -1
    law = laws_of([2], [[0, 0, 1, 0]])
    found = piece_laws(law, PATHS, np.array([1, 2]), tokens, depths, num_top=2)
    assert (found.ids[1, 0], found.probs[1, 0]) == (2, 1)


@pytest.mark.parametrize("num_top", [1, 2])
def test_only_the_likeliest_pieces_are_kept(num_top):
    laws = laws_of([3], [[0.1, 0.1, 0.1, 0.7]])
    zeros = np.zeros(1, np.int32)
    found = piece_laws(laws, PATHS, np.array([1]), zeros, zeros, num_top=num_top)
    assert found.ids.shape == (1, num_top)
    assert found.ids[0, 0] == 1
    np.testing.assert_allclose(found.probs[0], [0.7, 0.3][:num_top], atol=1e-6)


def test_long_spellings_count_as_unmapped():
    paths = spelling_paths(Spellings.from_runs({0: [0] * 40, 1: [1]}), 2)
    assert paths.shape[1] < 40
    assert (paths[0] == -1).all()
    assert paths[1, 0] == 1
