"""Special tokens and chat templates of a Hugging Face folder, from each document that has them."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.errors import CheckpointError, OmniDraftError, TokenizerError
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.model_request import ModelRequest
from omnidraft_npu.quantize.model_stage import check_text, prepare_model
from omnidraft_npu.text.tokenizer import Tokenizer
from omnidraft_npu.text.tokenizer_config import (
    chat_templates,
    read_tokenizer_config,
    special_token,
    special_tokens,
)

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 ids; <pad>, <bos> and <eos> are 0, 1 and 2, and no document names them."""
    folder = write_checkpoint(tmp_path_factory.mktemp("written") / "tiny")
    (folder / "tokenizer_config.json").write_text("{}")
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            document = json.loads(path.read_text())
            for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
                document.pop(key, None)
            path.write_text(json.dumps(document))
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(written, tmp_path / "tiny"))


def put(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(document | fields))


def test_tokens_that_only_the_map_names_begin_and_end_a_sequence(folder: Path) -> None:
    eos = {"content": "<eos>", "lstrip": False, "normalized": False, "rstrip": False}
    put(folder / "special_tokens_map.json", bos_token="<bos>", eos_token=eos)
    put(folder / "tokenizer_config.json", chat_template=TEMPLATE)

    files = open_checkpoint(folder).tokenizer()

    assert files.eos_token_ids == (2,)
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}])[0] == 1


CONFIGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"bos_token": "<bos>", "eos_token": "<eos>"}),
    ({"bos_token": "<pad>"}, {"bos_token": "<bos>"}),
    ({"bos_token": "<pad>", "sep_token": "<eos>"}, {"mask_token": "<bos>"}),
    ({"eos_token": "<eos>", "image_token": "<pad>"}, {}),
    ({"extra_special_tokens": {"image_token": "<pad>"}}, {"bos_token": "<bos>"}),
    ({"bos_token": "<bos>", "added_tokens_decoder": {}}, {"bos_token": "<pad>"}),
    ({"model_specific_special_tokens": {"audio_token": "<pad>"}}, {}),
    ({"bos_token": None}, {"bos_token": {"content": "<bos>", "lstrip": False}}),
]


@pytest.mark.parametrize(("config", "named"), CONFIGS)
def test_the_order_of_the_documents_is_that_of_transformers(
    folder: Path, config: dict[str, Any], named: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    put(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", **config)
    put(folder / "special_tokens_map.json", **named)
    expected = transformers.AutoTokenizer.from_pretrained(folder).special_tokens_map

    assert special_tokens(read_tokenizer_config(folder)) == expected


def test_a_role_that_a_described_configuration_lacks_comes_from_the_map(folder: Path) -> None:
    """transformers reads no map there, and then generates without an end."""
    put(folder / "tokenizer_config.json", added_tokens_decoder={}, bos_token="<bos>")
    put(folder / "special_tokens_map.json", eos_token="<eos>", bos_token="<pad>")
    config = read_tokenizer_config(folder)
    assert special_token(config, "eos_token") == "<eos>"
    assert special_token(config, "bos_token") == "<bos>"


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize(
    "value", ["2", 2.0, True, False, -1, 2**31, 2**64, [[2]], ["2"], [2, None], {"id": 2}, 4000]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_id_is_refused_by_file_and_key(
    folder: Path, name: str, key: str, value: Any
) -> None:
    put(folder / name, **{key: value})
    with pytest.raises(CheckpointError, match=rf"tiny/{name.replace('.', '.')}.*{key}") as caught:
        open_checkpoint(folder).tokenizer()
    assert "\n" not in str(caught.value)


def test_the_ids_of_a_text_model_inside_count_and_are_checked(folder: Path) -> None:
    put(folder / "config.json", text_config={"eos_token_id": 2})
    path = folder / "config.json"
    document = json.loads(path.read_text())
    from omnidraft_npu.quantize.tokenization.hf_tokenizer import read_tokenizer

    assert read_tokenizer(folder).eos_token_ids == (2,)
    path.write_text(json.dumps(document | {"text_config": {"eos_token_id": "2"}}))
    with pytest.raises(CheckpointError, match=r"config\.json: text_config: eos_token_id is '2'"):
        read_tokenizer(folder)


def request(folder: Path) -> ModelRequest:
    return ModelRequest(name="tiny", path=folder, source="tiny")


def test_an_export_warns_that_nothing_ends_an_answer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_text(prepare_model(request(folder)))
    assert "no token is known that ends a response" in caplog.text
    caplog.clear()
    put(folder / "generation_config.json", eos_token_id=2)
    with caplog.at_level(logging.WARNING):
        check_text(prepare_model(request(folder)))
    assert "ends a response" not in caplog.text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "cannot render"),
        ("{% break %}", "'break' outside loop"),
        ("{% unknown %}", "unknown tag"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[0].content.nothing.more }}", "cannot render"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "it makes a value"),
        ("x" * 70_000, "characters"),
    ],
)
def test_a_template_that_cannot_run_is_refused_before_an_export(
    folder: Path, template: str, reason: str
) -> None:
    put(folder / "tokenizer_config.json", chat_template=template, eos_token="<eos>")
    with pytest.raises(
        TokenizerError, match=f"tiny: the chat template .*{reason}.*take it out"
    ) as e:
        check_text(prepare_model(request(folder)))
    assert "\n" not in str(e.value)


def test_a_template_that_asks_for_a_system_message_is_exported(folder: Path) -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('none') }}{% endif %}"
    put(folder / "tokenizer_config.json", chat_template=template, eos_token="<eos>")
    check_text(prepare_model(request(folder)))


def test_templates_in_files_count_before_those_in_the_configuration(folder: Path) -> None:
    put(folder / "tokenizer_config.json", chat_template={"default": "a", "rag": "b"})
    assert chat_templates(read_tokenizer_config(folder)) == {"default": "a", "rag": "b"}
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools | length }}")
    expected = {"default": "a", "rag": "b", "tool_use": "{{ tools | length }}"}
    assert chat_templates(read_tokenizer_config(folder)) == expected
    (folder / "chat_template.jinja").write_text("c")
    expected = {"default": "c", "tool_use": "{{ tools | length }}"}
    assert chat_templates(read_tokenizer_config(folder)) == expected

    files = open_checkpoint(folder).tokenizer()
    tokenizer = Tokenizer.from_documents(files.tokenizer_json, files.tokenizer_config)
    assert tokenizer.apply_chat_template([]) == "c"
    assert tokenizer.apply_chat_template([], tools=[{}, {}]) == "2"


def test_a_model_with_named_templates_only_says_which() -> None:
    tokenizer = Tokenizer.from_documents("{}", {"chat_template": {"rag": "x"}})
    with pytest.raises(OmniDraftError, match="chat templates for 'rag' only"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [5]}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": [{"name": 1, "template": "x"}]}),
        ("tokenizer_config.json", {"chat_template": {"default": None}}),
        ("tokenizer_config.json", {"bos_token": 1}),
        ("tokenizer_config.json", {"eos_token": {"text": "x"}}),
        ("tokenizer_config.json", {"eos_token": ["<eos>"]}),
        ("tokenizer_config.json", {"add_bos_token": "yes"}),
        ("tokenizer_config.json", {"extra_special_tokens": {"a": 1}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "x"}}),
        ("tokenizer_config.json", []),
        ("special_tokens_map.json", {"bos_token": 1}),
        ("special_tokens_map.json", [1]),
        ("special_tokens_map.json", b"{"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("chat_template.jinja", b"\xff\xfe"),
        ("tokenizer.json", b"\xff\xfe"),
    ],
)
def test_a_document_of_a_wrong_shape_is_one_line(folder: Path, name: str, content: Any) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(data)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")) as caught:
        open_checkpoint(folder).tokenizer()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("merges", [1, 2]),
        ("merges", [["a"]]),
        ("merges", [["a", "b", "c"]]),
        ("merges", "ab"),
        ("vocab", {"a": "1"}),
        ("vocab", {"a": 1.5}),
        ("vocab", {"a": -1}),
        ("vocab", {"a": 2**40}),
        ("vocab", None),
        ("vocab", [["a", "b"]]),
        ("type", 5),
        ("unk_token", 5),
        ("byte_fallback", "x"),
    ],
)
def test_a_vocabulary_of_wrong_types_is_one_line(folder: Path, key: str, value: Any) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"][key] = value
    path.write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        open_checkpoint(folder).tokenizer()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
