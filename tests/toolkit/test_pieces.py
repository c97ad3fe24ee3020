"""Pieces spell the bytes they are asked for, and the tokenizer adds nothing of its own."""

import pytest
from shared_files import TOKENIZERS, encoder

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import Vocabulary

STRINGS = [
    b"",
    b"Hello  world",
    b" leading, \ttabs\t\tand\r\n\n lines ",
    "cafe\u0301 caf\u00e9 \u2581\u2581 x\u2581 日本語 😀".encode(),
    b"\xe4\xb8ab\xff \xe2\x80\xf0\x9f\x98 \x80",
    b"a\x04b\x13 \x00",
    b"<s> </s> <|im_end|> <unused7> <0x41>",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("data", STRINGS)
def test_each_piece_lies_where_it_is_said_to_lie(name, data):
    pieces, starts = encoder(name).encode(data)
    vocab = encoder(name).vocabulary
    absent = set(range(256)) - set(vocab.blob)
    at = 0
    for piece, start in zip(pieces, starts, strict=True):
        assert set(data[at:start]) <= absent
        at = start + len(vocab.token_bytes(piece))
        assert data[start:at] == vocab.token_bytes(piece) != b""
    assert set(data[at:]) <= absent


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_batch_spells_what_can_be_spelled_exactly_and_leaves_the_rest_empty(name):
    vocab = encoder(name).vocabulary
    for data, pieces in zip(STRINGS, encoder(name).encode_batch(STRINGS), strict=True):
        is_whole = b"".join(vocab.token_bytes(piece) for piece in pieces) == data
        assert is_whole or (not pieces and set(data) - set(vocab.blob))


def test_the_first_bytes_of_a_character_join_the_space_before_them():
    """SmolLM2 writes ' “' as b' \\xe2\\x80' and b'\\x9c'; the first waits for the second."""
    smollm = encoder("smollm2")
    pieces, _ = smollm.encode(b"said \xe2\x80")
    assert [smollm.vocabulary.token_bytes(piece) for piece in pieces] == [b"said", b" \xe2\x80"]


@pytest.mark.parametrize(
    "steps",
    [
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "NFC"},
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            }
        },
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Metaspace",
                        "replacement": "▁",
                        "prepend_scheme": "always",
                        "split": True,
                    }
                ],
            }
        },
        {
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "▁",
                "add_prefix_space": True,
            }
        },
    ],
)
def test_no_prefix_space_is_added(steps):
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": {"▁": 0, "a": 1, "e": 2, "\u0301": 3, "▁a": 4},
            "merges": [["▁", "a"]],
        },
        **steps,
    }
    pieces = PieceEncoder(document, Vocabulary.from_tokenizer_json(document))
    assert pieces.encode("a ae\u0301".encode())[0] == [1, 4, 2, 3]
