"""The drafter's pieces follow the target's bytes, at the same cost in a long context."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import encoder, texts, tokenizer_document, vocabulary
from toy_vocabularies import toy_document, toy_encoder

from omnidraft_npu.bridge.following import ByteBridge, IdentityBridge
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import Vocabulary

PAIRS = [("smollm2", "gemma3"), ("llama2", "qwen3"), ("qwen3", "llama2"), ("llama2", "smollm2")]
HARD_TEXT = (
    "  two leading spaces, double  spaces,\ttabs\t\tand\n\n\nnewlines\r\n    indented\n"
    "日本語のテキストには空白がありません。😀👩‍👩‍👧 caf\u00e9 cafe\u0301 \u2581 \u00a0x "
    "<|im_start|> <s> </s> <unused7> Привет, как дела?\n" + "=" * 300 + "aaaa" * 90 + " end "
)


def spelled(bridge, drafter):
    return b"".join(drafter.token_bytes(piece) for piece in bridge.pieces)


@functools.cache
def tokenizer(name):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(tokenizer_document(name)))


def target_ids(name, text):
    return tokenizer(name).encode(text, add_special_tokens=False).ids


def follow(bridge, ids, rng):
    """Extend in small rounds; check what `extend` says it kept, and yield the ids so far."""
    bridge.begin(ids[:2])
    at = 2
    while at < len(ids):
        before = list(bridge.pieces)
        end = at + int(rng.integers(1, 6))
        kept = bridge.extend(ids[at:end])
        assert 0 <= kept <= len(before)
        assert bridge.pieces[:kept] == before[:kept]
        at = min(end, len(ids))
        yield ids[:at]


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_following_in_rounds_equals_spelling_the_whole_text_anew(drafter, target, rng):
    pieces, tokens = vocabulary(drafter), vocabulary(target)
    bridge = ByteBridge(encoder(drafter), tokens)
    head = [] if pieces.bos_token_id is None else [pieces.bos_token_id]
    for text in (*texts()[::80], HARD_TEXT):
        plain = [i for i in target_ids(target, text) if not tokens.is_special[i]]
        for so_far in follow(bridge, plain, rng):
            data = b"".join(tokens.token_bytes(i) for i in so_far)
            assert bridge.pieces == head + encoder(drafter).encode(data)[0]
            assert spelled(bridge, pieces) == data


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_any_sequence_of_target_tokens_is_spelled_byte_for_byte(drafter, target, rng):
    """Random tokens make broken UTF-8; SmolLM2 has no piece for 21 bytes, which are left out."""
    pieces, tokens = vocabulary(drafter), vocabulary(target)
    bridge = ByteBridge(encoder(drafter), tokens)
    absent = bytes(set(range(256)) - set(pieces.blob))
    text_ids = np.flatnonzero(~tokens.is_special)
    broken = [i for i in text_ids.tolist() if is_broken(tokens.token_bytes(i))]
    for pool in (text_ids.tolist(), broken):
        ids = [pool[i] for i in rng.integers(len(pool), size=120)]
        for so_far in follow(bridge, ids, rng):
            data = b"".join(tokens.token_bytes(i) for i in so_far)
            assert spelled(bridge, pieces) == data.translate(None, absent)


def is_broken(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def test_there_is_one_bos_after_fifty_rounds_and_only_at_the_start(rng):
    llama, qwen = vocabulary("llama2"), vocabulary("qwen3")
    bridge = ByteBridge(encoder("llama2"), qwen)
    ids = target_ids("qwen3", "<|im_start|>user\n" + texts()[0] * 3)
    rounds = list(follow(bridge, ids, rng))
    assert len(rounds) >= 50
    assert bridge.pieces.count(llama.bos_token_id) == 1
    assert bridge.pieces[0] == llama.bos_token_id
    assert bridge.num_head == 1


def test_a_round_costs_the_same_in_a_long_context(monkeypatch):
    bridge = ByteBridge(encoder("llama2"), vocabulary("qwen3"))
    bridge.begin(target_ids("qwen3", "some words and more of them " * 2000))
    sizes = []
    encode = PieceEncoder.encode
    monkeypatch.setattr(
        PieceEncoder, "encode", lambda self, data: sizes.append(len(data)) or encode(self, data)
    )
    for token_id in target_ids("qwen3", texts()[0]):
        bridge.extend([token_id])
    assert max(sizes) < 80


def special_vocabulary(contents, **options):
    source = toy_document(np.random.default_rng(0), 0)
    source["added_tokens"] = [
        dict(source["added_tokens"][0], id=10 + i, content=content)
        for i, content in enumerate(contents)
    ]
    vocab = Vocabulary.from_tokenizer_json(source, **options)
    return PieceEncoder(source, vocab), vocab


def test_special_tokens_keep_their_content_or_end_role_or_become_plain_text():
    drafter, _ = special_vocabulary(
        ["<s>", "<|im_start|>", "<|im_end|>", "<pad>", "aa"], eos_token_ids=(12,), bos_token_id=10
    )
    _, target = special_vocabulary(
        ["<s>", "<|im_start|>", "<end_of_turn>", "<pad>", "abc", "<|end|>"],
        eos_token_ids=(12,),
        bos_token_id=10,
    )
    a, b, c, space = (target.by_bytes[letter] for letter in (b"a", b"b", b"c", b" "))
    bridge = ByteBridge(drafter, target)
    bridge.begin([10, 11, a, 12, 13, b, 10, space, 14])
    assert bridge.pieces == [
        10,  # BOS, once: the target's are left out, and so is padding
        11,  # equal content
        *drafter.encode(b"a")[0],
        12,  # equal role
        *drafter.encode(b"b abc")[0],  # <abc> has no equal: its text, joined to what is around
    ]
    bridge.extend([a, a])
    assert bridge.pieces[-2:] == drafter.encode(b"aa")[0]  # text, not the special token "aa"
    assert 14 not in bridge.pieces
    assert c not in (11, 12)


@pytest.mark.parametrize("eos_token_ids", [(), (10,)])
def test_a_token_like_the_bos_of_the_drafter_becomes_text(eos_token_ids):
    drafter, _ = special_vocabulary(["<s>"], bos_token_id=10, eos_token_ids=eos_token_ids)
    _, target = special_vocabulary(["<s>"])
    bridge = ByteBridge(drafter, target)
    bridge.begin([10, target.by_bytes[b"a"], 10])
    assert bridge.pieces == [10, *drafter.encode(b"<s>a<s>")[0]]
    assert bridge.pieces.count(10) == 1


def test_text_that_looks_like_a_special_token_stays_text():
    smollm, qwen = vocabulary("smollm2"), vocabulary("qwen3")
    bridge = ByteBridge(encoder("smollm2"), qwen)
    bridge.begin([token for char in "<|im_end|>" for token in target_ids("qwen3", char)])
    assert spelled(bridge, smollm) == b"<|im_end|>"
    bridge.begin(target_ids("qwen3", "<|im_end|>"))
    assert bridge.pieces == [2]


def test_equal_tokenizers_pass_ids_through_and_leave_out_rows_the_drafter_lacks():
    bridge = IdentityBridge(10)
    bridge.begin([3, 9, 10])
    assert bridge.extend([11, 4]) == 2
    assert bridge.pieces == [3, 9, 4]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    length=st.integers(3, 200),
)
def test_any_pair_of_vocabularies_follows_exactly(seed, sizes, length):
    rng = np.random.default_rng(seed)
    drafter, target = (toy_encoder(rng, size) for size in sizes)
    bridge = ByteBridge(drafter, target.vocabulary)
    ids = rng.integers(3, target.vocabulary.size, length).tolist()
    for so_far in follow(bridge, ids, rng):
        data = b"".join(target.vocabulary.token_bytes(i) for i in so_far)
        assert spelled(bridge, drafter.vocabulary) == data
    fresh = ByteBridge(drafter, target.vocabulary)
    fresh.begin(ids)
    bridge.begin(ids)
    assert bridge.pieces == fresh.pieces
