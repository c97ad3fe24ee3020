"""Small tokenizers of both kinds, byte by byte."""

import json
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from omnidraft_npu.text.tokenizer import Tokenizer

SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
PRE_TOKENIZER = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def byte_level() -> dict[str, Any]:
    """256 bytes, one merge, BOS 257, a token that is not special 258; no id 259; EOS 260."""
    vocab = {token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {"Ġa": 256, "<bos>": 257, "<think>": 258, "<eos>": 260}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 257, "content": "<bos>", **SPECIAL, "special": True},
            {"id": 258, "content": "<think>", **SPECIAL, "special": False},
            {"id": 260, "content": "<eos>", **SPECIAL, "special": True},
        ],
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZER,
        "post_processor": None,
        "decoder": PRE_TOKENIZER,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ġ", "a"]]},
    }


def space_mark() -> dict[str, Any]:
    """Byte tokens 0 to 255, then ``▁``, a, ``▁a``, 日; a space is put before every text."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    vocab |= {"▁": 256, "a": 257, "▁a": 258, "日": 259, "<s>": 260}
    space = {"String": " "}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 260, "content": "<s>", **SPECIAL, "special": True}],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": space, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [260], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [["▁", "a"]],
        },
    }


def tokenizer(document: dict[str, Any], **config: Any) -> Tokenizer:
    return Tokenizer.from_documents(json.dumps(document), config)
