"""What a target wrote, as examples for a drafter: pieces, laws, and which is which."""

import numpy as np
import pytest
from toy_vocabularies import toy_document

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.vocabulary import Role, Vocabulary
from omnidraft_npu.distillation import PieceLaws, TokenLaws, spelling_paths
from omnidraft_npu.examples import EqualExampleMaker, ExampleMaker, trie_paths, windows
from omnidraft_npu.replay import Example

TOP = 8


@pytest.fixture(scope="module")
def pair():
    """A drafter's encoder and vocabulary, a target's vocabulary, and the spellings."""
    documents = [toy_document(np.random.default_rng(seed), 30 + seed) for seed in (0, 1)]
    drafter, target = (Vocabulary.from_tokenizer_json(d, eos_token_ids=(2,)) for d in documents)
    encoder = PieceEncoder(documents[0], drafter)
    return encoder, target, full_spellings(encoder, target)


@pytest.fixture(scope="module")
def maker(pair):
    encoder, target, spellings = pair
    return ExampleMaker(encoder, target, spelling_paths(spellings, target.size), num_top=TOP)


def answer(target, rng, count=20):
    """Some text and an end, each token the likeliest."""
    text = np.flatnonzero((target.roles == Role.TEXT) & ~target.is_fallback)
    ids = np.append(rng.choice(text, count), 2).astype(np.int32)
    others = rng.choice(text, (len(ids), 3)).astype(np.int32)
    probs = np.tile(np.float32([0.7, 0.1, 0.05, 0.05]), (len(ids), 1))
    return TokenLaws(
        token_ids=ids, top_ids=np.concatenate([ids[:, None], others], axis=1), probs=probs
    )


def test_the_pieces_spell_the_answer_after_the_prompt(pair, maker, rng):
    encoder, target, _ = pair
    laws = answer(target, rng)
    prompt = answer(target, rng).token_ids[:-1].tolist()
    example = maker.make(prompt, laws)
    said = example.pieces[-example.num_response :]
    spelled = b"".join(encoder.vocabulary.token_bytes(i) for i in said)
    assert spelled == b"".join(target.token_bytes(i) for i in laws.token_ids)
    before = example.pieces[: -example.num_response]
    assert b"".join(encoder.vocabulary.token_bytes(i) for i in before) == b"".join(
        target.token_bytes(i) for i in prompt
    )


def test_a_direct_piece_is_the_whole_token_and_others_are_parts(pair, maker, rng):
    encoder, target, _ = pair
    example = maker.make([], laws := answer(target, rng, 60))
    said = example.pieces[-example.num_response :]
    assert example.is_direct.any()
    assert not example.is_direct.all()
    for piece, token, is_direct in zip(said, example.tokens, example.is_direct, strict=True):
        piece_bytes = encoder.vocabulary.token_bytes(piece)
        if is_direct:
            assert piece_bytes == target.token_bytes(laws.token_ids[token])
    assert not (example.is_direct & ~example.is_drafted).any()


def test_the_context_can_be_cut_at_its_start(pair, maker, rng):
    _, target, _ = pair
    prompt = answer(target, rng).token_ids[:-1].tolist()
    whole = maker.make(prompt, laws := answer(target, rng))
    cut = maker.make(prompt, laws, max_context=4)
    assert len(cut.pieces) == 4 + cut.num_response
    np.testing.assert_array_equal(cut.pieces, whole.pieces[-len(cut.pieces) :])


def test_a_trie_knows_the_paths_of_its_spellings(pair):
    _, target, spellings = pair
    found = trie_paths(SpellingTrie.build(spellings, target.size))
    expected = spelling_paths(spellings, target.size)
    np.testing.assert_array_equal(found[:, : expected.shape[1]], expected)
    assert (found[:, expected.shape[1] :] == -1).all()


def test_a_spelling_that_is_too_long_is_no_path(pair):
    _, target, spellings = pair
    trie = SpellingTrie.build(spellings, target.size)
    full, short = trie_paths(trie), trie_paths(trie, longest=2)
    is_short = full[:, 2:].max(axis=1, initial=-1) < 0
    assert not is_short.all()
    np.testing.assert_array_equal(short[is_short], full[is_short, :2])
    assert (short[~is_short] == -1).all()


def test_equal_tokenizers_need_no_spelling():
    laws = TokenLaws(
        token_ids=np.array([4, 11, 5], np.int32),
        top_ids=np.array([[4, 12, 6], [11, 4, 5], [12, 5, 4]], np.int32),
        probs=np.array([[0.5, 0.3, 0.1], [0.6, 0.2, 0.1], [0.4, 0.3, 0.2]], np.float32),
    )
    example = EqualExampleMaker(num_pieces=10, num_top=2).make([11, 3, 7], laws)
    np.testing.assert_array_equal(example.pieces, [3, 7, 4, 5])
    np.testing.assert_array_equal(example.laws.ids, [[4, 6], [5, 4]])
    np.testing.assert_allclose(example.laws.probs, [[0.5, 0.1], [0.3, 0.2]])


def long_example(num_context, num_response):
    pieces = np.arange(num_context + num_response, dtype=np.int32)
    rows = np.arange(num_context, num_context + num_response, dtype=np.int32)
    return Example(
        pieces=pieces,
        laws=PieceLaws(ids=rows[:, None], probs=np.ones((num_response, 1), np.float32)),
        tokens=rows,
        is_drafted=rows >= 0,
        is_direct=rows % 2 == 0,
    )


@pytest.mark.parametrize("num_context", [0, 1, 5, 30])
@pytest.mark.parametrize("num_response", [1, 9, 10, 11, 40])
def test_windows_hold_every_law_once_with_what_led_to_it(num_context, num_response):
    example = long_example(num_context, num_response)
    found = list(windows(example, 10, num_context=3))
    laws = np.concatenate([w.laws.ids[:, 0] for w in found] or [np.empty(0, np.int32)])
    np.testing.assert_array_equal(laws, np.arange(max(num_context, 1), len(example.pieces)))
    for w in found:
        assert len(w.pieces) <= 10
        np.testing.assert_array_equal(w.pieces[-w.num_response :], w.laws.ids[:, 0])
        before = len(w.pieces) - w.num_response
        assert before >= min(3, w.laws.ids[0, 0])
