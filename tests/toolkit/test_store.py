"""The local store finds models by path, name and hub id, and notices what is damaged."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from omnidraft_npu.errors import DamagedModelError, StoreError
from omnidraft_npu.store import local
from omnidraft_npu.store.builtin_models import BUILTIN_MODELS
from omnidraft_npu.store.local import (
    damaged_models,
    resolve_model,
    store_folder,
    stored_models,
    stored_path,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and a working folder without models."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


CONTENT = b"GGUF and some weights"


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in models that hold a few bytes."""
    for name, model in list(BUILTIN_MODELS.items()):
        sha256 = hashlib.sha256(CONTENT).hexdigest()
        small = replace(model, size=len(CONTENT), sha256=sha256)
        monkeypatch.setitem(BUILTIN_MODELS, name, small)


def put_builtin(name: str, content: bytes = CONTENT) -> Path:
    path = local.builtin_path(BUILTIN_MODELS[name])
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def put_hub(hub_id: str) -> Path:
    path = local.hub_path(hub_id)
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"12345")
    return path


def put_shards(hub_id: str) -> Path:
    """A checkpoint of two shards, recorded as `pull` does."""
    path = put_hub(hub_id)
    (path / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for shard in shards:
        (path / shard).write_bytes(CONTENT)
    index = {"weight_map": {f"layer.{i}": shard for i, shard in enumerate(shards)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_path(hub_id, reads_all=True) == path
    return path


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2", "SmolLM2-135M-Instruct"])
def test_a_builtin_model_is_found_by_name_and_alias(name: str) -> None:
    path = put_builtin("smollm2-135m")
    assert resolve_model(name) == path


def test_a_hub_model_is_found_by_its_id() -> None:
    path = put_hub("lmsys/vicuna--7b")
    assert resolve_model("lmsys/vicuna--7b") == path
    assert [model.name for model in stored_models()] == ["lmsys/vicuna--7b"]


def test_an_existing_path_wins_over_every_name() -> None:
    put_builtin("smollm2-135m")
    put_hub("org/model")
    for name in ("smollm2-135m", "org/model"):
        Path(name).mkdir(parents=True)
        assert resolve_model(name) == Path(name)


def test_a_file_of_another_size_is_not_the_model() -> None:
    put_builtin("smollm2-135m", b"short")
    with pytest.raises(StoreError):
        resolve_model("smollm2-135m")
    assert stored_models() == []


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m", "lmsys/vicuna-7b-v1.5"])
def test_a_known_name_says_how_to_get_it(name: str) -> None:
    with pytest.raises(StoreError, match=f"omnidraft-npu pull {name}"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("gemma", "did you mean gemma3-270m?"),
        ("gema-3-270m", "did you mean gemma3-270m?"),
        ("xyzzy", "known are smollm2-135m, gemma3-270m."),
        ("", "the model's name is empty"),
        ("./model.gguf", "./model.gguf does not exist"),
        ("model.gguf", "model.gguf does not exist"),
        ("a/b/c", "no model is called 'a/b/c'"),
        ("../up", "../up does not exist"),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, message: str) -> None:
    with pytest.raises(StoreError) as caught:
        resolve_model(name)
    assert message in str(caught.value)


def test_hub_models_are_among_the_near_names() -> None:
    put_hub("lmsys/vicuna-7b")
    with pytest.raises(StoreError, match="did you mean lmsys/vicuna-7b"):
        resolve_model("vicuna-7b")


def test_the_list_has_what_was_pulled_and_nothing_half_done() -> None:
    path = put_hub("org/model")
    (path.parent / ".org--other.partial").mkdir()
    put_builtin("gemma3-270m")
    found = {model.name: model for model in stored_models()}
    assert list(found) == ["gemma3-270m", "org/model"]
    assert found["org/model"].size_bytes == 7
    assert found["gemma3-270m"].size_bytes == BUILTIN_MODELS["gemma3-270m"].size


def test_without_a_setting_the_store_is_in_the_place_for_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMNIDRAFT_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    places = {
        "linux": ".cache/omnidraft-npu",
        "darwin": "Library/Caches/omnidraft-npu",
        "win32": "AppData/Local/omnidraft-npu",
    }
    for platform, place in places.items():
        monkeypatch.setattr(local.sys, "platform", platform)
        assert store_folder() == tmp_path / place
    monkeypatch.setattr(local.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store_folder() == tmp_path / "cache" / "omnidraft-npu"


def test_looking_for_a_model_makes_no_folder(home: Path) -> None:
    with pytest.raises(StoreError):
        resolve_model("smollm2-135m")
    assert stored_models() == []
    assert not home.exists()
    assert list(Path().iterdir()) == []


def flip(path: Path) -> None:
    """Change bytes in place, not the size."""
    data = bytearray(path.read_bytes())
    data[1] ^= 255
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, 3),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "folder": replace_by_folder,
}
if hasattr(os, "mkfifo"):
    DAMAGES["fifo"] = replace_by_fifo


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("was_seen", [True, False])
def test_a_damaged_builtin_model_is_refused_in_one_line(damage: str, was_seen: bool) -> None:
    """Flipped bytes in a stored GGUF were exported, and the answers were nonsense."""
    path = put_builtin("smollm2-135m")
    if was_seen:
        assert resolve_model("smollm2-135m") == path
    DAMAGES[damage](path)
    with pytest.raises(DamagedModelError, match="get it again with omnidraft-npu pull smollm2-"):
        resolve_model("smollm2-135m")
    assert stored_models() == []
    assert list(damaged_models()) == ["smollm2-135m"]


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_damaged_hub_model_is_refused_in_one_line(damage: str, name: str) -> None:
    path = put_shards("org/model")
    (DAMAGES | {"missing": Path.unlink})[damage](path / name)
    with pytest.raises(DamagedModelError, match="pull org/model") as caught:
        resolve_model("org/model")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_a_hub_folder_without_a_record_is_whole_only_with_all_its_parts(name: str) -> None:
    """A folder that lacked a shard counted as complete."""
    path = put_shards("org/model")
    local.record_path("org/model").unlink()
    assert resolve_model("org/model") == path
    (path / name).unlink()
    with pytest.raises(DamagedModelError, match="lacks"):
        resolve_model("org/model")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"weight_map": 3}'])
def test_an_index_that_names_no_shards_is_damaged(content: bytes) -> None:
    path = put_shards("org/model")
    local.record_path("org/model").unlink()
    (path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(DamagedModelError, match="is no index of shards"):
        resolve_model("org/model")


def test_an_unchanged_file_is_read_once() -> None:
    path = put_builtin("smollm2-135m")
    read = []
    for _ in range(3):
        stored_path("smollm2-135m", progress=lambda done, total: read.append(done))
    assert read == [len(CONTENT)]
    os.utime(path)
    stored_path("smollm2-135m", progress=lambda done, total: read.append(done))
    stored_path("smollm2-135m", reads_all=True, progress=lambda done, total: read.append(done))
    assert read == [len(CONTENT)] * 3


@pytest.mark.parametrize("text", ["", "{", "null", '{"files": 3}', '{"files": {"a": {}}}'])
def test_a_damaged_record_is_made_again(text: str) -> None:
    path = put_builtin("smollm2-135m")
    assert resolve_model("smollm2-135m") == path
    record = local.record_path(BUILTIN_MODELS["smollm2-135m"])
    whole = record.read_text()
    record.write_text(text)
    assert resolve_model("smollm2-135m") == path
    assert record.read_text() == whole


def test_a_store_that_cannot_be_written_is_read(home: Path) -> None:
    path = put_builtin("smollm2-135m")
    (home / "records").write_text("in the way of records")
    for _ in range(2):
        assert resolve_model("smollm2-135m") == path
    flip(path)
    with pytest.raises(DamagedModelError):
        resolve_model("smollm2-135m")


def test_a_link_to_a_whole_model_is_the_model(tmp_path: Path) -> None:
    path = put_builtin("smollm2-135m")
    path.rename(tmp_path / "elsewhere.gguf")
    path.symlink_to(tmp_path / "elsewhere.gguf")
    assert resolve_model("smollm2-135m") == path
    (tmp_path / "elsewhere.gguf").unlink()
    with pytest.raises(DamagedModelError, match="is missing"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", ["a" * 300, "o/" + "m" * 300, "a/" * 3000, "nul\0"])
def test_a_name_that_no_path_can_have_is_unknown(name: str) -> None:
    with pytest.raises(StoreError):
        resolve_model(name)
