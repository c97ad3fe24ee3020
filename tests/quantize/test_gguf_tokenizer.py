"""Tokenizers rebuilt from GGUF metadata give the ids of the exact files."""

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from omnidraft_npu.errors import TokenizerError
from omnidraft_npu.quantize.checkpoints.checkpoint import TokenizerFiles
from omnidraft_npu.quantize.checkpoints.gguf_file import read_gguf_header
from omnidraft_npu.quantize.tokenization import pretokenizers
from omnidraft_npu.quantize.tokenization.gguf_tokenizer import tokenizer_from_gguf
from omnidraft_npu.text.tokenizer import Tokenizer
from omnidraft_npu.text.tokenizer_config import chat_templates

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from real_models import real_model
from shared_files import shared_path, texts, tokenizer_document
from synthetic_metadata import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    alphabet,
    metadata_of,
)

NASTY = [
    "",
    " ",
    "\n",
    "\t\t\tindented\t",
    *(" " * n + "x" + " " * n for n in (1, 2, 3, 16, 30, 31, 32, 33, 65)),
    *("\n" * n for n in (2, 5, 31, 32, 40)),
    "a\r\nb\r\n\r\n  c\r",
    "x = 1234567890.12345e-7",
    "１２３ ٣٤٥ ½ Ⅷ",
    "việc và nhiều điều hợp lý",  # tokens of Llama 3 that its merges do not lead to
    "日本語とEnglishの混合、句読点。",
    "한국어 텍스트 ไทย हिन्दी ქართული",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 ☝🏽",
    "e\u0301 vs \u00e9, \ufb01 \u200b\u200d\u2060",
    "".join(map(chr, range(1, 33))) + "\x7f\x80\x85\xa0\xad",
    "\ufeffBOM \ufffd \U0010ffff \ue000",
    "▁▁ Ġword ▁x",
    "<s></s><unk><bos><eos><pad><mask>[multimodal]<unused5><start_of_turn>user",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|eot_id|><|begin_of_text|><think> </think>",
    "<0x41><0xFF> <table><tr> </div>",
    "".join(chr(0x100 + i * 37 % 0x2000) for i in range(400)),
]


def ids_differ(rebuilt: Tokenizer, exact: Tokenizer, samples: list[str]) -> list[str]:
    return [
        text
        for text in samples
        if rebuilt.encode(text, add_special=False) != exact.encode(text, add_special=False)
    ]


def from_fields(fields: dict[str, Any]) -> Tokenizer:
    files = tokenizer_from_gguf(fields)
    return Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)


@functools.cache
def real_files(name: str) -> TokenizerFiles:
    return tokenizer_from_gguf(read_gguf_header(real_model(name)).fields)


@functools.cache
def real_tokenizer(name: str) -> Tokenizer:
    files = real_files(name)
    return Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)


@functools.cache
def made_fields(name: str, pre: str | None, rows: int | None = None) -> dict[str, Any]:
    return metadata_of(tokenizer_document(name), pre=pre, rows=rows)


@pytest.mark.parametrize(
    ("model", "exact"), [("smollm2.gguf", "smollm2"), ("gemma3-270m.gguf", "gemma3")]
)
def test_real_metadata_gives_the_ids_of_the_exact_tokenizer(model: str, exact: str) -> None:
    rebuilt = real_tokenizer(model)
    reference = Tokenizer.from_folder(shared_path(f"tokenizers/{exact}"))
    beyond = "<image_soft_token>"  # the one id that Gemma's file has and the model has not
    samples = [text for text in [*texts(), *NASTY] if beyond not in text]
    assert not ids_differ(rebuilt, reference, samples)
    assert rebuilt.size == min(reference.size, 262_144)


@pytest.mark.parametrize(
    ("name", "pre", "rows"),
    [
        ("smollm2", "smollm", None),
        ("llama3", "llama-bpe", None),
        ("qwen3", "qwen2", 151_936),
        ("llama2", None, None),
    ],
)
def test_metadata_gives_the_ids_of_the_tokenizer_it_was_made_from(
    name: str, pre: str | None, rows: int | None
) -> None:
    rebuilt = from_fields(made_fields(name, pre, rows))
    exact = Tokenizer.from_folder(shared_path(f"tokenizers/{name}"))
    assert not ids_differ(rebuilt, exact, [*texts(), *NASTY])
    assert rebuilt.size == exact.size
    samples = [exact.encode(text, add_special=False) for text in [*texts()[::10], *NASTY]]
    assert all(rebuilt.decode(ids) == exact.decode(ids) for ids in samples)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_another_way_of_splitting_would_give_other_ids(pre: str) -> None:
    """The comparison above can tell the ways apart."""
    wrong = from_fields(made_fields("smollm2", pre))
    exact = Tokenizer.from_folder(shared_path("tokenizers/smollm2"))
    assert ids_differ(wrong, exact, NASTY)


def test_merges_follow_the_order_of_the_published_document() -> None:
    rebuilt = real_tokenizer("gemma3-270m.gguf").json["model"]
    exact = tokenizer_document("gemma3")["model"]
    assert rebuilt["merges"] == [list(merge) for merge in exact["merges"]]
    assert rebuilt["vocab"] == exact["vocab"]


@pytest.mark.parametrize(
    ("model", "exact"), [("smollm2.gguf", "smollm2"), ("gemma3-270m.gguf", "gemma3")]
)
def test_the_same_tokens_are_special_as_in_the_published_document(model: str, exact: str) -> None:
    rebuilt = real_tokenizer(model)
    flags = {t["id"]: t["special"] for t in rebuilt.json["added_tokens"]}
    published = {
        t["id"]: t["special"]
        for t in tokenizer_document(exact)["added_tokens"]
        if t["id"] < rebuilt.size
    }
    assert flags == published
    assert any(published.values())


def test_marks_of_an_image_are_special_and_reserved_names_are_not() -> None:
    fields = {
        "tokenizer.ggml.tokens": [
            *MARKED["tokenizer.ggml.tokens"],
            "<start_of_image>",
            "<unused7>",
            "<table>",
        ],
        "tokenizer.ggml.token_type": [
            *MARKED["tokenizer.ggml.token_type"],
            USER_DEFINED,
            CONTROL,
            USER_DEFINED,
        ],
        "tokenizer.ggml.scores": [*MARKED["tokenizer.ggml.scores"], 0.0, 0.0, 0.0],
    }
    added = from_fields(MARKED | fields).json["added_tokens"]
    special = {token["content"]: token["special"] for token in added}
    assert special == {
        "<unk>": True,
        "<s>": True,
        "<start_of_image>": True,
        "<unused7>": False,
        "<table>": False,
    }


def test_a_rebuilt_tokenizer_has_the_content_hash_of_the_exact_one() -> None:
    rebuilt = from_fields(made_fields("smollm2", "smollm"))
    exact = Tokenizer.from_folder(shared_path("tokenizers/smollm2"))
    assert rebuilt.content_sha256 == exact.content_sha256


def test_special_ids_and_the_template_come_from_the_metadata() -> None:
    smollm = real_files("smollm2.gguf")
    assert smollm.bos_token_id is None
    assert smollm.eos_token_ids == (2, 0)
    assert "<|im_start|>" in smollm.tokenizer_config["chat_template"]
    gemma = real_files("gemma3-270m.gguf")
    assert gemma.bos_token_id == 2
    assert gemma.eos_token_ids == (1, 106)
    assert "chat_template" not in gemma.tokenizer_config


SMALL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*alphabet(), "Ġa", "<|im_end|>", "[PAD]"],
    "tokenizer.ggml.token_type": [NORMAL] * 257 + [CONTROL, UNUSED],
    "tokenizer.ggml.merges": ["Ġ a"],
    "tokenizer.ggml.eos_token_id": 257,
}
MARKED = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "▁a",
    ],
    "tokenizer.ggml.token_type": [UNKNOWN, CONTROL] + [BYTE] * 256 + [NORMAL] * 3,
    "tokenizer.ggml.scores": [0.0] * 258 + [-2.0, -1.0, -0.5],
    "tokenizer.ggml.bos_token_id": 1,
}


def test_small_metadata_makes_a_tokenizer() -> None:
    """The cases of the next tests fail for the reason they name and for no other."""
    tokenizer = from_fields(SMALL)
    assert tokenizer.decode(tokenizer.encode(" a ü", add_special=True)) == " a ü"
    assert tokenizer.size == 258
    marked = from_fields(MARKED)
    assert marked.encode("a", add_special=True) == [1, 260]
    assert marked.decode([1, 260]) == "a"


def test_no_space_is_added_where_the_metadata_says_so() -> None:
    marked = from_fields(MARKED | {"tokenizer.ggml.add_space_prefix": False})
    assert marked.encode("a a", add_special=True) == [1, 259, 260]
    assert marked.decode([1, 259, 260]) == "a a"


@pytest.mark.parametrize(("pre", "bos"), [("gpt-2", None), ("qwen2", None), ("llama-bpe", 257)])
def test_where_the_metadata_says_nothing_the_kind_decides_on_a_first_token(
    pre: str, bos: int | None
) -> None:
    fields = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 257}
    assert tokenizer_from_gguf(SMALL | fields).bos_token_id == bos


def test_no_first_token_is_added_where_the_metadata_says_so() -> None:
    files = tokenizer_from_gguf(MARKED | {"tokenizer.ggml.add_bos_token": False})
    assert files.bos_token_id is None
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    assert tokenizer.encode("a", add_special=True) == [260]


@pytest.mark.parametrize("value", [2**32 - 1, 259, -1])
@pytest.mark.parametrize("role", ["padding", "unknown", "eot", "eom", "bos"])
def test_an_id_that_nothing_needs_may_be_no_token(
    role: str, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Converters write the largest number for none; llama.cpp warns and goes on."""
    key = f"tokenizer.ggml.{role}_token_id"
    fields = SMALL | {"tokenizer.ggml.add_bos_token": False}
    files = tokenizer_from_gguf(fields | {key: value})

    assert files == tokenizer_from_gguf({k: v for k, v in fields.items() if k != key})
    assert [r.getMessage() for r in caplog.records] == [
        f"{key} is {value}, the GGUF file has 259 tokens: not used"
    ]


def test_a_first_token_that_is_wanted_must_be_a_token() -> None:
    fields = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 2**32 - 1}
    with pytest.raises(TokenizerError, match="bos_token_id is 4294967295, but the GGUF file has"):
        tokenizer_from_gguf(SMALL | fields)


@pytest.mark.parametrize(
    ("fields", "key", "value", "message"),
    [
        (SMALL, "pre", "falcon", "'falcon', which is not known (known: gpt-2, smollm, llama-bpe"),
        (SMALL, "pre", None, "which is not known"),
        (SMALL, "model", "t5", "tokenizer model 't5' is not supported"),
        (SMALL, "tokens", None, "no tokenizer.ggml.tokens"),
        (SMALL, "merges", None, "no tokenizer.ggml.merges"),
        (SMALL, "tokens", 5, "tokenizer.ggml.tokens of the GGUF file is 5, must be a list"),
        (SMALL, "eos_token_id", [2], "eos_token_id is [2], but"),
        (SMALL, "merges", ["Ġ b"], "tokens and merges give is not a tokenizer"),
        (SMALL, "token_type", [NORMAL], "259 tokens but 1 tokenizer.ggml.token_type"),
        (SMALL, "token_type", [9] * 259, "token 0 of the GGUF file has type 9"),
        (SMALL, "eos_token_id", 300, "eos_token_id is 300, but the GGUF file has 259 tokens"),
        (
            SMALL,
            "token_type",
            [NORMAL] * 256 + [UNUSED, CONTROL, CONTROL],
            "tokens and merges give is not a tokenizer",
        ),
        (MARKED, "scores", None, "no tokenizer.ggml.scores"),
        (SMALL, "tokens", [1] * 259, "tokens of the GGUF file: [0] is 1, must be a string"),
        (SMALL, "merges", [1, 2], "merges of the GGUF file: [0] is 1, must be a string"),
        (SMALL, "token_type", [True] * 259, "[0] is True, must be an integer"),
        (SMALL, "add_bos_token", "x", "add_bos_token of the GGUF file is 'x', must be true or"),
        (MARKED, "add_space_prefix", 1, "add_space_prefix of the GGUF file is 1, must be true or"),
        (MARKED, "scores", [math.nan] * 261, "holds NaN or infinity"),
        (MARKED, "scores", [0.0] * 261, "the same score"),
        (MARKED, "scores", [0.0], "261 tokens but 1 tokenizer.ggml.scores"),
        (MARKED, "remove_extra_whitespaces", True, "rewrites its text"),
    ],
)
def test_metadata_that_cannot_be_rebuilt_is_refused(
    fields: dict[str, Any], key: str, value: Any, message: str
) -> None:
    changed = fields | {f"tokenizer.ggml.{key}": value}
    if value is None:
        del changed[f"tokenizer.ggml.{key}"]
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_gguf(changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(pretokenizers.PRETOKENIZERS))
def test_a_split_that_is_not_the_known_one_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = pretokenizers.PRETOKENIZERS[name]
    others = [p for p in pretokenizers.PRETOKENIZERS.values() if p.document != known.document]
    assert len(others) >= 3
    for other in others:
        wrong = dataclasses.replace(known, document=other.document)
        monkeypatch.setitem(pretokenizers.PRETOKENIZERS, name, wrong)
        with pytest.raises(TokenizerError, match="is split into"):
            tokenizer_from_gguf(SMALL | {"tokenizer.ggml.pre": name})


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    tokens = [token for token in alphabet() if token != "Ċ"]
    fields = {
        "tokenizer.ggml.tokens": [*tokens, "<nl>", "Ġa", "<|im_end|>", "[PAD]"],
        "tokenizer.ggml.merges": ["Ġ a"],
    }
    with pytest.raises(TokenizerError, match="comes back as"):
        tokenizer_from_gguf(SMALL | fields)


def test_a_token_that_occurs_twice_is_refused() -> None:
    fields = {
        "tokenizer.ggml.tokens": [*alphabet(), "Ġa", "<|im_end|>", "a"],
        "tokenizer.ggml.token_type": [NORMAL] * 257 + [CONTROL, NORMAL],
    }
    with pytest.raises(TokenizerError, match=r"token 'a' of id .* has id 258"):
        tokenizer_from_gguf(SMALL | fields)


def test_several_chat_templates_keep_their_names() -> None:
    named = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    found = tokenizer_from_gguf(SMALL | named).tokenizer_config
    assert chat_templates(found) == {"default": "one", "tool_use": "two"}
    with pytest.raises(TokenizerError, match="chat_template of the GGUF file: default is 5"):
        tokenizer_from_gguf(SMALL | {"tokenizer.chat_template": 5})
