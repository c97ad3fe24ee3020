"""Tokenizer documents of Hugging Face folders, and whether they belong to the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from shared_files import shared_path
from tiny_checkpoints import SENTENCES, train_tokenizer, write_checkpoint
from tokenizers import Tokenizer, processors

from omnidraft_npu.errors import CheckpointError, TokenizerError
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.tokenization.hf_tokenizer import _first_id
from omnidraft_npu.text.tokenizer_config import chat_templates


@pytest.fixture
def folder(tmp_path) -> Path:
    """300 rows and as many ids; <pad>, <bos> and <eos> are 0, 1 and 2."""
    return write_checkpoint(tmp_path / "tiny")


def put(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(document | fields))


def add_tokens(folder: Path, *tokens: str) -> None:
    """Further special tokens after all others."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    first = len(document["model"]["vocab"])
    for i, token in enumerate(tokens, first):
        document["added_tokens"].append(dict(document["added_tokens"][0], id=i, content=token))
    path.write_text(json.dumps(document))


def begin_with_bos(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def read(folder: Path):
    return open_checkpoint(folder).tokenizer()


def test_the_document_is_the_folders_own(folder):
    files = read(folder)

    assert files.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert files.tokenizer_config["eos_token"] == "<eos>"
    assert files.bos_token_id is None
    assert files.eos_token_ids == (2,)


def test_every_configured_end_counts_once_whatever_its_form(folder):
    put(folder / "generation_config.json", eos_token_id=[7, 2])
    put(folder / "config.json", eos_token_id=9)
    put(folder / "tokenizer_config.json", eos_token={"content": "<pad>", "lstrip": False})

    assert read(folder).eos_token_ids == (7, 2, 9, 0)


def test_the_end_of_turn_of_a_chat_template_ends_a_response(tmp_path):
    folder = write_checkpoint(tmp_path / "tiny", num_logits=301)
    add_tokens(folder, "<|im_end|>")
    assert read(folder).eos_token_ids == (2,)

    put(folder / "tokenizer_config.json", chat_template="{{ messages }}<|im_end|>")
    assert read(folder).eos_token_ids == (2, 300)


@pytest.mark.parametrize(
    ("added_by_processor", "add_bos_token", "expected"),
    [
        (False, None, None),
        (True, None, 1),
        (True, False, None),
        (False, True, 1),
        (True, True, 1),
    ],
)
def test_the_first_id_is_what_the_tokenizer_really_adds(
    folder, added_by_processor, add_bos_token, expected
):
    put(folder / "tokenizer_config.json", bos_token="<bos>", add_bos_token=add_bos_token)
    if added_by_processor:
        begin_with_bos(folder)

    assert read(folder).bos_token_id == expected


def test_the_chat_template_is_found_in_each_of_its_places(folder):
    path = folder / "tokenizer_config.json"
    put(path, chat_template="plain")
    assert read(folder).tokenizer_config["chat_template"] == "plain"

    named = [{"name": "tools", "template": "other"}, {"name": "default", "template": "usual"}]
    for form in (named, {"tools": "other", "default": "usual"}):
        put(path, chat_template=form)
        found = chat_templates(read(folder).tokenizer_config)
        assert found == {"tools": "other", "default": "usual"}

    (folder / "chat_template.jinja").write_text("beside")
    assert read(folder).tokenizer_config["chat_template"] == "beside"

    put(path, chat_template=[named[0]])
    (folder / "chat_template.jinja").unlink()
    assert chat_templates(read(folder).tokenizer_config) == {"tools": "other"}


def test_a_folder_without_a_usable_tokenizer_is_refused(folder):
    path = folder / "tokenizer.json"
    for text in ("{", "{}", '{"model": {"type": "BPE"}}'):
        path.write_text(text)
        with pytest.raises(TokenizerError, match=r"tiny/tokenizer\.json is not a tokenizer"):
            read(folder)
    path.unlink()
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        read(folder)


def test_a_folder_with_a_sentencepiece_model_only_is_read(tmp_path):
    """Byte fallback and merges; the ends come from the configuration as well."""
    import sentencepiece

    folder = write_checkpoint(tmp_path / "tiny", num_logits=320)
    (folder / "tokenizer.json").unlink()
    (folder / "corpus.txt").write_text("\n".join(SENTENCES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    put(folder / "generation_config.json", eos_token_id=[2, 9])

    files = read(folder)

    assert files.bos_token_id == 1
    assert files.eos_token_ids == (2, 9)
    assert Tokenizer.from_str(files.tokenizer_json).encode("the large target").ids[0] == 1


@pytest.mark.parametrize("vocab_size", [301, 320])
def test_a_tokenizer_with_ids_the_model_has_no_rows_for_is_refused(folder, vocab_size):
    (folder / "tokenizer.json").write_text(train_tokenizer(vocab_size))
    with pytest.raises(TokenizerError, match=f"has {vocab_size} ids .* the model has 300 rows"):
        read(folder)


def test_padded_rows_are_fine_but_not_more_of_them_than_ids(tmp_path):
    assert read(write_checkpoint(tmp_path / "some", num_logits=384)).eos_token_ids == (2,)
    with pytest.raises(TokenizerError, match="has 300 ids up to 299, the model has 700 rows"):
        read(write_checkpoint(tmp_path / "many", num_logits=700))


def test_a_special_id_that_is_no_token_is_refused(folder):
    put(folder / "generation_config.json", eos_token_id=[2, 4_000])
    with pytest.raises(
        CheckpointError, match=r"tiny/generation_config\.json: eos_token_id is 4000, .* none of"
    ):
        read(folder)


def test_the_one_id_beyond_a_gemma_is_not_a_token_any_more(tmp_path):
    folder = write_checkpoint(tmp_path / "tiny", "gemma3_text")
    add_tokens(folder, "<image_soft_token>")
    files = read(folder)

    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    ids = tokenizer.encode("see <image_soft_token>").ids
    assert max(ids) < 300
    assert tokenizer.decode(ids) == "see <image_soft_token>"

    add_tokens(folder, "<image_soft_token>", "<another>")
    with pytest.raises(TokenizerError, match="ids up to 301"):
        read(folder)


def test_a_llama_with_one_id_too_many_is_refused(folder):
    """What Gemma may have is a mistake elsewhere: a padding token without a row, often."""
    add_tokens(folder, "[PAD]")
    with pytest.raises(TokenizerError, match="ids up to 300"):
        read(folder)


@pytest.mark.parametrize(
    ("name", "bos_token_id"),
    [("qwen3", None), ("smollm2", None), ("gemma3", 2)],
)
def test_published_tokenizers_begin_a_sequence_as_they_should(name, bos_token_id):
    source = shared_path(f"tokenizers/{name}")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    config = source / "tokenizer_config.json"
    settings = json.loads(config.read_text()) if config.is_file() else {}

    assert _first_id(tokenizer, settings) == bos_token_id


def test_a_tokenizer_document_may_begin_with_a_byte_order_mark(folder):
    expected = open_checkpoint(folder).tokenizer()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert open_checkpoint(folder).tokenizer() == expected
