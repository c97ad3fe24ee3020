"""A bundle that is not what its manifest says is refused, and the message names the difference."""

import json

import pytest

from omnidraft_npu.bundle import HASHED_BYTES, open_bundle
from omnidraft_npu.errors import BundleError, ConfigError
from omnidraft_npu.files import sha256_of, write_json
from omnidraft_npu.manifest import FileEntry, GraphEntry, Manifest, ModelEntry

GRAPH = "drafter/cpu/model.onnx"


def model(name, folder):
    return ModelEntry(
        name=name,
        source=name,
        architecture="llama",
        exporter="builder",
        folder=folder,
        vocab_size=60,
        num_logits=64,
        context_length=32,
        eos_token_ids=(2,),
        bos_token_id=None,
        tokenizer_sha256="0" * 64,
        graphs={
            "cpu": GraphEntry(path=f"{folder}/cpu/model.onnx", precision="fp32", cache="shared")
        },
    )


@pytest.fixture
def bundle(tmp_path):
    """A small valid bundle with two targets."""
    models = {"drafter": model("d", "drafter")}
    targets = {name: model(name, f"targets/{name}") for name in ("one", "two")}
    files = {}
    for entry in (*models.values(), *targets.values()):
        for relative in (entry.graphs["cpu"].path, f"{entry.folder}/tokenizer.json"):
            path = tmp_path / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(entry.name.encode() * 100)
            files[relative] = FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
    manifest = Manifest(
        tool_version="0.1.0", drafter=models["drafter"], targets=targets, files=files
    )
    write_json(tmp_path / "manifest.json", manifest.to_json())
    return tmp_path


def edit(bundle, change):
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_manifest_survives_the_way_to_disk_and_back(bundle):
    opened = open_bundle(bundle, verify=True)
    assert Manifest.from_json(json.loads(json.dumps(opened.manifest.to_json()))) == opened.manifest
    assert opened.manifest.targets["one"].eos_token_ids == (2,)
    assert opened.path(GRAPH).read_bytes() == b"d" * 100


def test_the_first_target_is_the_default_and_an_unknown_one_lists_the_others(bundle):
    opened = open_bundle(bundle)
    assert opened.target(None).name == "one"
    assert opened.target("two").name == "two"
    with pytest.raises(ConfigError, match="one, two"):
        opened.target("three")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format_version=2), "format_version 2"),
        (lambda d: d.pop("format_version"), "no format_version"),
        (lambda d: d.update(colour="red"), "unknown key 'colour'"),
        (lambda d: d["drafter"].pop("vocab_size"), "drafter lacks 'vocab_size'"),
        (lambda d: d["drafter"].update(vocab_size="many"), "drafter.vocab_size is 'many'"),
        (lambda d: d["drafter"].update(vocab_size=True), "drafter.vocab_size is True"),
        (lambda d: d["drafter"].update(eos_token_ids=2), "drafter.eos_token_ids is 2"),
        (lambda d: d["drafter"]["graphs"]["cpu"].update(cache="ring"), "cache is 'ring'"),
        (lambda d: d["drafter"].update(vocab_size=0), "drafter.vocab_size is 0"),
        (lambda d: d["drafter"].update(num_logits=-1), "drafter.num_logits is -1"),
        (lambda d: d["targets"]["two"].update(context_length=0), "two.context_length is 0"),
        (lambda d: d["drafter"].update(vocab_size=65), "vocab_size is 65, must be at most"),
        (lambda d: d["drafter"].update(eos_token_ids=[2, 64]), "eos_token_ids has 64, must"),
        (lambda d: d["drafter"].update(bos_token_id=-1), "bos_token_id is -1, must"),
        (lambda d: d["drafter"].update(name=".."), "drafter.name is '..'"),
        (lambda d: d["drafter"].update(name="a/b"), "drafter.name is 'a/b'"),
        (lambda d: d["drafter"].update(name=""), "drafter.name is ''"),
        (lambda d: d["drafter"].update(name="a" * 300), "drafter.name is 'aaa"),
        (lambda d: d["drafter"].update(num_logits=2**31), "num_logits is 2147483648, must be"),
        (lambda d: d["files"][GRAPH].update(size=1.5), f"files.{GRAPH}.size is 1.5, must be"),
        (lambda d: d["targets"]["one"].update(name="two"), "target 'one' has the name 'two'"),
        (lambda d: d["drafter"].update(folder="../x"), "folder is '../x', a path outside"),
        (lambda d: d["drafter"].update(folder=""), "folder is '', a path outside"),
        (
            lambda d: d["drafter"]["graphs"]["cpu"].update(path="/x"),
            "graphs.cpu.path is '/x', a path outside",
        ),
        (
            lambda d: d["files"].pop("targets/two/tokenizer.json"),
            "no file 'targets/two/tokenizer.json' though two",
        ),
        (
            lambda d: d["targets"]["two"].update(tokenizer_sha256="1" * 64),
            "no file 'spellings/two/spelling.safetensors' though two",
        ),
        (lambda d: d.update(targets={}), "no target"),
        (lambda d: d["files"].pop(GRAPH), f"no file '{GRAPH}'"),
        (lambda d: d["files"].update({"../evil": d["files"][GRAPH]}), "outside the bundle"),
        (lambda d: d["files"].update({"/evil": d["files"][GRAPH]}), "outside the bundle"),
        (lambda d: d["files"].update({"a\\..\\b": d["files"][GRAPH]}), "outside the bundle"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(bundle, change, message):
    edit(bundle, change)
    with pytest.raises(BundleError, match=message.replace(".", r"\.").replace("\\", "")):
        open_bundle(bundle)


def test_a_deleted_file_is_named(bundle):
    (bundle / GRAPH).unlink()
    with pytest.raises(BundleError, match=f"{GRAPH} is missing"):
        open_bundle(bundle)


def test_a_cut_file_is_named_with_both_sizes(bundle):
    (bundle / GRAPH).write_bytes(b"d" * 99)
    with pytest.raises(BundleError, match="99 bytes, the manifest says 100"):
        open_bundle(bundle)


def test_a_changed_file_of_the_same_size_is_named(bundle):
    (bundle / GRAPH).write_bytes(b"e" * 100)
    with pytest.raises(BundleError, match="SHA-256"):
        open_bundle(bundle)


def test_large_files_are_hashed_only_when_asked(bundle):
    path = bundle / "weights.data"
    with path.open("wb") as file:
        file.truncate(HASHED_BYTES + 1)
    edit(
        bundle,
        lambda d: d["files"].update(
            {"weights.data": {"size": HASHED_BYTES + 1, "sha256": "0" * 64}}
        ),
    )
    open_bundle(bundle)
    with pytest.raises(BundleError, match=r"weights\.data is not the file"):
        open_bundle(bundle, verify=True)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"3", b"[" * 100_000])
def test_a_manifest_that_is_not_one_is_refused(bundle, content):
    (bundle / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError):
        open_bundle(bundle)


def test_a_folder_without_a_manifest_says_how_to_make_a_bundle(tmp_path):
    with pytest.raises(BundleError, match="omnidraft-npu export"):
        open_bundle(tmp_path)
    with pytest.raises(BundleError, match="is not a directory"):
        open_bundle(tmp_path / "absent")
