"""Tokenizers rebuilt from `tokenizer.model` give the ids of the SentencePiece library."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from omnidraft_npu.errors import TokenizerError
from omnidraft_npu.quantize.tokenization.sentencepiece_tokenizer import tokenizer_from_sentencepiece
from omnidraft_npu.quantize.tokenization.tokenizer_documents import (
    Piece,
    PieceKind,
    merges_from_scores,
)
from omnidraft_npu.text.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece")

CORPUS = """The quick brown fox jumps over the lazy dog, and then the dog jumps over the fox.
She sells sea shells by the sea shore; the shells she sells are surely sea shells.
    for i in range(10):
        print(i, "the number", i * i)
A café in Zürich serves naïve travellers; the travellers then travel on over the sea.
"""
TEXTS = [
    "the fox and the dog",
    " two  spaces   three    four",
    "        print(i)\n\tx",
    "日本語 and 😀 are bytes",
    "\r\n",
    " ",
    "",
    "▁ marks",
    "shells 12345 sells",
    "naïve Zürich\u00a0",
]


@pytest.fixture(scope="module")
def trained() -> bytes:
    return train()


def train(**options: Any) -> bytes:
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.99,
        "minloglevel": 2,
        "num_threads": 1,
    }
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines() * 20),
        model_writer=model,
        **(settings | options),
    )
    return model.getvalue()


def rebuilt(folder: Path, model: bytes, config: dict[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.model"
    path.write_bytes(model)
    files = tokenizer_from_sentencepiece(path, config)
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    assert tokenizer.bos_token_id == files.bos_token_id
    return tokenizer


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"split_digits": True}])
@pytest.mark.parametrize("legacy", [True, False])
def test_ids_and_text_equal_the_librarys(
    tmp_path: Path, options: dict[str, Any], legacy: bool
) -> None:
    model = train(**options)
    reference = spm.SentencePieceProcessor(model_proto=model)
    tokenizer = rebuilt(tmp_path, model, {"legacy": legacy})
    for text in [*TEXTS, *CORPUS.splitlines()]:
        if not legacy and text.startswith((" ", "▁")):
            continue  # the next test
        ids = tokenizer.encode(text, add_special=False)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_a_leading_space_stands_for_the_added_one_where_not_legacy(
    tmp_path: Path, trained: bytes
) -> None:
    """What transformers does; the library itself would write two."""
    tokenizer = rebuilt(tmp_path, trained, {"legacy": False})
    assert tokenizer.encode(" the", add_special=False) == tokenizer.encode("the", add_special=False)


def test_the_first_token_is_added_once(tmp_path: Path, trained: bytes) -> None:
    tokenizer = rebuilt(tmp_path, trained, {})
    bos = spm.SentencePieceProcessor(model_proto=trained).bos_id()
    ids = tokenizer.encode("the fox", add_special=True)
    assert ids[0] == bos
    assert ids[1:] == tokenizer.encode("the fox", add_special=False)
    assert tokenizer.encode("<s>the fox", add_special=True) == ids
    assert rebuilt(tmp_path, trained, {"add_bos_token": False}).bos_token_id is None


def test_the_space_is_put_before_the_text_only_where_not_legacy(
    tmp_path: Path, trained: bytes
) -> None:
    def texts(config: dict[str, Any]) -> str:
        tokenizer = rebuilt(tmp_path, trained, config)
        ids = tokenizer.encode("the</s>fox", add_special=False)
        return tokenizer.decode(ids, skip_special=False)

    assert texts({}) == "the</s> fox"
    assert texts({"legacy": False}) == "the</s>fox"


def test_added_tokens_follow_the_pieces(tmp_path: Path, trained: bytes) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 420}))
    special = {"content": "<|im_end|>", "special": True}
    tokenizer = rebuilt(tmp_path, trained, {"added_tokens_decoder": {"422": special}})
    assert tokenizer.size == 423
    assert tokenizer.encode("the<pad><|im_end|>", add_special=False)[-2:] == [420, 422]
    assert tokenizer.decode([420, 421, 422]) == "<pad>"


def test_special_tokens_of_the_configuration_count(tmp_path: Path, trained: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained)
    files = tokenizer_from_sentencepiece(path, {"eos_token": {"content": "<s>"}})
    assert files.eos_token_ids == (1,)
    assert tokenizer_from_sentencepiece(path, {}).eos_token_ids == (2,)


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    model = train(model_type="unigram", vocab_size=325)
    with pytest.raises(TokenizerError, match="another kind than BPE"):
        rebuilt(tmp_path, model, {})


@pytest.mark.parametrize(
    "options", [{"normalization_rule_name": "nmt_nfkc"}, {"remove_extra_whitespaces": True}]
)
def test_a_model_that_rewrites_its_text_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="rewrites its text"):
        rebuilt(tmp_path, train(**options), {})


def test_a_damaged_file_is_refused(tmp_path: Path, trained: bytes) -> None:
    for damaged in (b"", b"not a model", trained[: len(trained) // 2], trained[5:]):
        with pytest.raises(TokenizerError, match=r"tokenizer\.model") as caught:
            rebuilt(tmp_path, damaged, {})
        assert "\n" not in str(caught.value)


def test_damaged_added_tokens_are_refused(tmp_path: Path, trained: bytes) -> None:
    with pytest.raises(TokenizerError, match="added_tokens_decoder has the key 'x'"):
        rebuilt(tmp_path, trained, {"added_tokens_decoder": {"x": {"content": "a"}}})


def test_a_piece_of_very_many_characters_takes_no_time():
    """Every cut of it copied the whole: 200,000 characters took 5 s, a million two minutes."""
    texts = ["a", "b", "ab", "aba", "x" * 1_000_000]
    pieces = [Piece(text=text, kind=PieceKind.NORMAL) for text in texts]
    started = time.process_time()
    assert merges_from_scores(pieces) == [("ab", "a"), ("a", "b")]
    assert time.process_time() - started < 1
