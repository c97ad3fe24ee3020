"""Text to ids and back, special tokens, content hashes and chat templates of tokenizers."""

import copy
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft_npu.errors import PromptError, TokenizerError
from omnidraft_npu.text.detokenizer import StreamDecoder
from omnidraft_npu.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared_files import shared_path, texts, tokenizer_document
from tiny_tokenizers import PRE_TOKENIZER, SPECIAL, byte_level, space_mark, tokenizer

KINDS = {"byte level": tokenizer(byte_level()), "space mark": tokenizer(space_mark())}


def test_size_counts_from_the_highest_id() -> None:
    assert tokenizer(byte_level()).size == 261


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_decoding_gives_the_text_back(kind: str, text: str) -> None:
    text = text.replace("▁", "_")
    ids = KINDS[kind].encode(text, add_special=True)
    assert KINDS[kind].decode(ids) == text


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen3", "gemma3", "smollm2"])
def test_decoding_equals_the_librarys_on_real_text(name: str) -> None:
    from tokenizers import Tokenizer as Library

    file = shared_path(f"tokenizers/{name}/tokenizer.json")
    ours, library = Tokenizer.from_folder(file.parent), Library.from_file(str(file))
    for text in texts()[::3]:
        ids = ours.encode(text, add_special=True)
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True) == text


def test_control_tokens_are_shown_only_when_asked_for() -> None:
    ours = tokenizer(byte_level())
    ids = ours.encode("<bos>a<think>", add_special=False)
    assert ours.decode(ids) == "a<think>"
    assert ours.decode(ids, skip_special=False) == "<bos>a<think>"


def test_an_added_token_is_written_as_it_is_and_not_in_the_byte_alphabet() -> None:
    document = byte_level()
    document["model"]["vocab"]["éĠ"] = 261
    added = {"id": 261, "content": "éĠ", **SPECIAL, "special": False}
    ours = tokenizer(document | {"added_tokens": [*document["added_tokens"], added]})
    assert ours.decode(ours.encode("aéĠa", add_special=False)) == "aéĠa"
    assert ours.token_bytes(261) == "éĠ".encode()


def test_ids_without_a_token_have_no_text() -> None:
    assert tokenizer(byte_level()).decode([259, 300]) == ""


def test_the_space_before_every_text_is_taken_away_once() -> None:
    ours = tokenizer(space_mark())
    assert ours.encode(" a", add_special=False) == [256, 258]
    assert ours.decode([256, 258]) == " a"
    assert ours.decode([258]) == "a"
    assert ours.decode([257, 258]) == "a a"


def test_bytes_that_are_no_character_become_a_replacement() -> None:
    assert tokenizer(space_mark()).decode([257, 0xE6, 0x97, 257]) == "a\ufffda"


@pytest.mark.parametrize(
    ("document", "config", "bos"),
    [
        (space_mark(), {}, 260),
        (space_mark(), {"add_bos_token": False, "bos_token": "<s>"}, None),
        (byte_level(), {"bos_token": "<bos>"}, None),
        (byte_level(), {"bos_token": "<bos>", "add_bos_token": True}, 257),
        (byte_level(), {"bos_token": {"content": "<bos>"}, "add_bos_token": True}, 257),
        (byte_level(), {"bos_token": None, "add_bos_token": True}, None),
    ],
)
def test_first_token_comes_from_the_configuration_or_the_document(
    document: dict[str, Any], config: dict[str, Any], bos: int | None
) -> None:
    ours = tokenizer(document, **config)
    assert ours.bos_token_id == bos
    ids = ours.encode("a", add_special=False)
    assert ours.encode("a", add_special=True) == ([] if bos is None else [bos]) + ids


def test_a_template_that_writes_the_first_token_gets_no_second() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ours = tokenizer(space_mark(), bos_token="<s>", chat_template=template)
    prompt = ours.apply_chat_template([{"role": "user", "content": "a"}])
    assert prompt == "<s>a"
    assert ours.encode(prompt, add_special=True) == [260, 258]


def test_half_a_surrogate_pair_is_an_error_in_one_line() -> None:
    with pytest.raises(PromptError, match="not valid UTF-8"):
        tokenizer(byte_level()).encode("a\ud800", add_special=True)


def shuffled(document: Any) -> Any:
    if isinstance(document, dict):
        items = [(key, shuffled(value)) for key, value in document.items()]
        random.Random(3).shuffle(items)
        return dict(items)
    return document


def test_content_hash_does_not_see_the_layout() -> None:
    document = byte_level()
    plain = tokenizer(document).content_sha256
    indented = json.dumps(shuffled(document), indent=3, ensure_ascii=False)
    assert Tokenizer.from_documents(indented, {}).content_sha256 == plain
    merges = {"merges": ["Ġ a"], "unk_token": None, "continuing_subword_prefix": ""}
    older = document | {"model": document["model"] | merges, "truncation": None, "padding": None}
    assert tokenizer(older).content_sha256 == plain


def test_content_hash_sees_what_changes_ids() -> None:
    changes: list[tuple[str, Any]] = [
        ("normalizer", {"type": "NFC"}),
        ("pre_tokenizer", PRE_TOKENIZER | {"add_prefix_space": True}),
        ("added_tokens", byte_level()["added_tokens"][:2]),
        ("model", byte_level()["model"] | {"merges": []}),
        ("model", byte_level()["model"] | {"ignore_merges": True}),
    ]
    hashes = {tokenizer(byte_level() | {key: value}).content_sha256 for key, value in changes}
    hashes.add(tokenizer(byte_level()).content_sha256)
    swapped = copy.deepcopy(byte_level())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    hashes.add(tokenizer(swapped).content_sha256)
    hashes.add(tokenizer(byte_level(), bos_token="<bos>", add_bos_token=True).content_sha256)
    assert len(hashes) == len(changes) + 3


def test_real_tokenizers_have_different_hashes() -> None:
    names = ("llama2", "smollm2")
    folders = [shared_path(f"tokenizers/{name}") for name in names]
    assert len({Tokenizer.from_folder(folder).content_sha256 for folder in folders}) == 2


def test_a_folder_is_read_with_the_template_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()), encoding="utf-8")
    assert not Tokenizer.from_folder(tmp_path).has_chat_template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "new"


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[1]", b"\xff\xfe"])
def test_an_unusable_document_is_an_error_in_one_line(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path).encode("a", add_special=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_unusable_configuration_is_an_error_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("is_continuation", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(data=st.data())
def test_stream_of_any_ids_joins_to_the_decoded_text(
    kind: str, is_continuation: bool, data: st.DataObject
) -> None:
    ours = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, ours.size)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    stream = StreamDecoder(ours, is_continuation=is_continuation)
    bounds = [0, *cuts, len(ids)]
    joined = "".join(stream.push(ids[a:b]) for a, b in itertools.pairwise(bounds))
    joined += stream.finish()
    if is_continuation and ours.has_space_prefix:
        assert joined.removeprefix(" ") == ours.decode(ids)
        first = ours.encode("a", add_special=False)
        assert joined == ours.decode([*first, *ids]).removeprefix("a")
    else:
        assert joined == ours.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text())
def test_stream_of_a_text_never_shows_half_a_character(kind: str, text: str) -> None:
    text = text.replace("\ufffd", "?").replace("▁", "_")
    stream = StreamDecoder(KINDS[kind])
    deltas = [stream.push([i]) for i in KINDS[kind].encode(text, add_special=True)]
    assert "\ufffd" not in "".join(deltas)
    assert stream.finish() == ""
    assert "".join(deltas) == text


def test_stream_shows_a_character_as_soon_as_it_is_whole() -> None:
    stream = StreamDecoder(tokenizer(space_mark()))
    assert [stream.push([i]) for i in (256, 0xE6, 0x97, 0xA5, 257)] == ["", "", "", "日", "a"]
    assert stream.push([0xE6]) == ""
    assert stream.finish() == "\ufffd"


def test_the_library_parses_the_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer(byte_level())
    assert ours.json is ours.json
    document = json.dumps(byte_level())
    monkeypatch.setattr(
        json, "loads", lambda text: pytest.fail("parsed") if text == document else {}
    )
    assert Tokenizer.from_documents(document, {}).encode("a", add_special=True)


def test_shared_documents_agree_with_the_parsed_ones() -> None:
    folder = shared_path("tokenizers/smollm2")
    assert Tokenizer.from_folder(folder).json == tokenizer_document("smollm2")
