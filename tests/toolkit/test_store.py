"""The local store finds models by path, name and hub id."""

from pathlib import Path

import pytest

from omnidraft_npu.errors import StoreError
from omnidraft_npu.store import local
from omnidraft_npu.store.builtin_models import BUILTIN_MODELS
from omnidraft_npu.store.local import resolve_model, store_folder, stored_models


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and a working folder without models."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def put_builtin(name: str, size: int | None = None) -> Path:
    model = BUILTIN_MODELS[name]
    path = local.builtin_path(model)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.size if size is None else size)
    return path


def put_hub(hub_id: str) -> Path:
    path = local.hub_path(hub_id)
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
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
    put_builtin("smollm2-135m", size=5)
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
    (path / "model.safetensors").write_bytes(b"12345")
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
