"""Every id has its exact bytes or a role, never both."""

import json
import time

import numpy as np
import pytest
from shared_files import TOKENIZERS, texts, tokenizer_document, vocabulary

from omnidraft_npu.bridge.vocabulary import END_ROLES, Role, Vocabulary
from omnidraft_npu.errors import TokenizerError


def document(vocab, *, added=(), **model):
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": [], **model},
        "added_tokens": [{"special": True, **entry} for entry in added],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
    }


@pytest.mark.parametrize("name", TOKENIZERS)
def test_token_bytes_join_to_the_text_that_was_encoded(name):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_document(name)))
    vocab = vocabulary(name)
    for text in (*texts()[::20], "日本語 😀\n\n\t x\r\n  \u00e9"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        spelled = b"".join(vocab.token_bytes(i) for i in ids)
        prefix = b" " if name == "llama2" else b""  # its normalizer prepends one
        assert spelled == prefix + text.encode()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_id_has_bytes_or_a_role_and_never_both(name):
    vocab = vocabulary(name)
    np.testing.assert_array_equal(vocab.lengths > 0, ~vocab.is_special)
    eos_token_ids, bos_token_id, size = TOKENIZERS[name]
    assert vocab.size == size
    assert set(vocab.special_ids(*END_ROLES)) == set(eos_token_ids)
    assert vocab.bos_token_id == bos_token_id


@pytest.mark.parametrize(
    ("drafter", "target", "common"),
    [
        ("llama2", "qwen3", 26_342),
        ("llama2", "llama3", 26_599),
        ("llama2", "smollm2", 18_709),
        ("smollm2", "gemma3", 46_145),
        ("smollm2", "qwen3", 39_234),
        ("smollm2", "llama3", 39_310),
    ],
)
def test_known_vocabularies_share_the_known_number_of_byte_strings(drafter, target, common):
    shared = vocabulary(drafter).by_bytes.keys() & vocabulary(target).by_bytes.keys()
    assert len(shared) == common


def test_rows_without_a_token_are_unused_and_ids_past_the_model_are_left_out():
    qwen, gemma = vocabulary("qwen3"), vocabulary("gemma3")
    assert (qwen.roles[151_669:] == Role.UNUSED).all()
    assert 262_144 in {entry["id"] for entry in tokenizer_document("gemma3")["added_tokens"]}
    assert gemma.size == 262_144
    assert gemma.roles[6] == Role.UNUSED  # <unused0>


def test_the_largest_vocabulary_is_read_quickly():
    source = tokenizer_document("gemma3")
    start = time.perf_counter()
    Vocabulary.from_tokenizer_json(source)
    assert time.perf_counter() - start < 1.5


def test_roles_are_told_apart():
    contents = ["<unk>", "<s>", "</s>", "<pad>", "<|im_end|>", "<tool>", "<unused3>"]
    added = [{"id": i, "content": content} for i, content in enumerate(contents)]
    vocab = Vocabulary.from_tokenizer_json(
        document({"<unk>": 0, "a": 7, "b": 9}, added=added, unk_token="<unk>"),
        size=11,
        eos_token_ids=(2, 4),
        bos_token_id=1,
    )
    expected = [
        "UNK",
        "BOS",
        "EOS",
        "PAD",
        "END_OF_TURN",
        "OTHER",
        "UNUSED",
        "TEXT",
        "UNUSED",
        "TEXT",
        "UNUSED",
    ]
    assert [Role(role).name for role in vocab.roles] == expected
    assert vocab.special_contents[5] == "<tool>"
    assert 8 not in vocab.special_contents


def test_equal_bytes_belong_to_the_text_piece_and_then_to_the_lowest_id():
    vocab = Vocabulary.from_tokenizer_json(
        document({"<0x41>": 0, "<0x42>": 1, "A": 2, " x": 4, "▁x": 3}, byte_fallback=True)
    )
    assert vocab.by_bytes == {b"A": 2, b"B": 1, b" x": 3}
    assert vocab.token_bytes(0) == b"A"
    assert vocab.token_bytes(4) == b" x"


def test_a_byte_piece_is_plain_text_without_byte_fallback():
    vocab = Vocabulary.from_tokenizer_json(document({"<0x41>": 0}))
    assert vocab.token_bytes(0) == b"<0x41>"


def test_added_text_of_a_byte_level_vocabulary_is_taken_literally():
    source = document({"Ġa": 0}, added=[{"id": 1, "content": "Ġ é", "special": False}])
    source["decoder"] = {"type": "ByteLevel"}
    vocab = Vocabulary.from_tokenizer_json(source)
    assert vocab.all_bytes() == [b" a", "Ġ é".encode()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "'Unigram' is not supported"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "'WordPiece' is not supported"),
        (
            {"model": {"type": "BPE", "vocab": {}, "end_of_word_suffix": "</w>"}},
            "end_of_word_suffix '</w>' is not supported",
        ),
        ({"normalizer": None}, "without a byte alphabet"),
    ],
)
def test_other_kinds_of_tokenizers_are_refused_with_what_is_supported(change, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        Vocabulary.from_tokenizer_json(document({"a": 0}) | change)
    assert "byte-level BPE" in str(caught.value)
