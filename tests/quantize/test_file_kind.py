"""A file is called what it is: failed downloads, archives, other formats, in any place."""

import gzip
import json
import zipfile

import pytest
from tiny_checkpoints import save_tiny_model

from omnidraft_npu.errors import OmniDraftError
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint

CONTENTS = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "web page": b"\n  <!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>",
    "XML": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "gzip": gzip.compress(b"{}" * 1000),
    "pickled": b"\x80\x04\x95" + bytes(20),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
    "is empty": b"",
}
PLACES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model.gguf",
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    save_tiny_model(folder, "llama", num_hidden_layers=1)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path, documents):
    path = tmp_path / "tiny"
    path.mkdir()
    for name, content in documents.items():
        (path / name).write_bytes(content)
    return path


def refused(path, message):
    with pytest.raises(OmniDraftError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CONTENTS)
def test_what_lies_in_the_place_of_a_file_is_named(folder, kind, place):
    if place.startswith("model.safetensors.index"):
        (folder / "model.safetensors").unlink()
    (folder / place).write_bytes(CONTENTS[kind])

    refused(folder / place if place.endswith("gguf") else folder, f"{place} .*{kind}")


def test_a_zip_archive_and_a_pickled_model_are_told_apart(tmp_path):
    for name, inside, message in (
        ("model.zip", "model.gguf", "is a ZIP archive: unpack it"),
        ("pytorch_model.bin", "archive/data.pkl", "is a pickled PyTorch file, which can run code"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(inside, "content")
        refused(tmp_path / name, message)


def test_a_header_whose_length_looks_like_a_pickle_is_read(folder):
    """The length of a header comes first: 640 is 0x80 0x02."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    wanted = length + (0x0280 - length) % 0x10000
    header = content[8 : 8 + length] + b" " * (wanted - length)
    path.write_bytes(wanted.to_bytes(8, "little") + header + content[8 + length :])

    assert path.read_bytes()[:2] == b"\x80\x02"
    assert open_checkpoint(folder).config.num_layers == 1


def test_a_weight_file_is_answered_with_its_folder(folder):
    refused(folder / "model.safetensors", "is a safetensors file: give the folder")
    refused(folder / "config.json", "is a JSON document|not a GGUF file")


def test_a_peft_folder_is_named_with_its_base(tmp_path, folder):
    config = json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})
    (tmp_path / "adapter_config.json").write_text(config)
    refused(tmp_path, "holds a PEFT adapter of org/base, not a model of its own: merge it first")
    # transformers would load the model with the adapter.
    (folder / "adapter_config.json").write_text(config)
    refused(folder, "holds a PEFT adapter of org/base")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model-00001-of-00003.gguf", "model-00002-of-00003.gguf"], r"in 3 parts.*--merge"),
        (["mmproj-f16.gguf"], r"no model but mmproj-f16\.gguf"),
        (["b.gguf", "mmproj-f16.gguf"], r"give one of them: .*b\.gguf"),
        (["a-00001-of-00002.gguf", "b.gguf"], r"give one of them: .*b\.gguf"),
        (["manifest.json", "x.txt"], "is a bundle"),
        (["model.onnx"], r"holds an ONNX graph \(model\.onnx\)"),
        (["params.json", "consolidated.00.pth"], "its maker's own format"),
        (["model.safetensors"], r"config\.json is missing"),
        ([], r"config\.json is missing"),
    ],
)
def test_a_folder_without_a_configuration_is_called_what_it_is(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    refused(tmp_path, message)


def test_the_folder_inside_that_has_a_configuration_is_named(tmp_path, folder):
    refused(tmp_path, r"a folder in it has one; give .*tiny")
