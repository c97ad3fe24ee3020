"""The bundle that `run` makes where none is named."""

import json
import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import onnx
import pytest
from onnx import TensorProto
from tiny_bundle import CONTEXT, write_bundle

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.commands import default_pair
from omnidraft_npu.errors import CheckpointError, ConfigError, StoreError
from omnidraft_npu.files import sha256_of
from omnidraft_npu.store.local import hub_path


def test_a_missing_package_is_told_before_anything_is_fetched(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(default_pair, "fetch_model", lambda name, **_: fetched.append(name))
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(CheckpointError, match=r"pip install '\.\[export\]'"):
        default_pair.default_bundle(None, accept_terms=True)
    assert not fetched


TRAINING = "drafter/cpu/lora_step.onnx"


def edit_drafter(bundle, *, inputs=("pieces", "overlap_weight"), **training):
    """Have the drafter learn with these fields, by a graph of these inputs, or not at all."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    drafter = document["drafter"]
    if training:
        own = {"path": TRAINING, "num_top": 32, "gradient_error": None}
        drafter["training"] = (drafter["training"] or own) | training
        drafter["graphs"]["cpu"]["lora_rank"] = drafter["training"]["lora_rank"]
    else:
        drafter["training"] = None
    values = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in inputs]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "", values, [])), bundle / TRAINING)
    document["files"][TRAINING] = {
        "size": (bundle / TRAINING).stat().st_size,
        "sha256": sha256_of(bundle / TRAINING),
    }
    path.write_text(json.dumps(document))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Targets that a default bundle was made for; a tiny bundle stands in for each."""
    targets = []

    def make(bundle, target, accept_terms):
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir()
        write_bundle(bundle, eos=())
        edit_drafter(bundle, lora_rank=16, batch=8, length=CONTEXT)
        targets.append(target)

    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    monkeypatch.setattr(default_pair, "_make", make)
    return targets


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """The weights of a drafter that stands in for the shipped one."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    monkeypatch.setattr(default_pair, "packaged_drafter", lambda name: folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"one")
    return weights


def test_a_default_bundle_is_made_once_for_each_target(made, drafter):
    bundles = [
        default_pair.default_bundle(target, accept_terms=False)
        for target in (None, "smollm2-135m", "gemma3-270m", None)
    ]
    assert made == ["smollm2-135m", "gemma3-270m"]
    assert bundles[0] == bundles[1] == bundles[3] != bundles[2]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_another_drafter_makes_another_bundle(made, drafter, name, capsys):
    """Whatever changed in it; the earlier bundle may have learned, so it is named and kept."""
    before = default_pair.default_bundle(None, accept_terms=False)
    other = default_pair.default_bundle("gemma3-270m", accept_terms=False)
    assert "is used no more" not in capsys.readouterr().err
    drafter.with_name(name).write_bytes(b"two")
    after = default_pair.default_bundle(None, accept_terms=False)
    assert after not in (before, other)
    assert made == ["smollm2-135m", "gemma3-270m", "smollm2-135m"]
    told = capsys.readouterr().err
    assert f"{before} was made with another drafter" in told
    assert str(other) not in told
    assert before.is_dir()

    assert default_pair.default_bundle(None, accept_terms=False) == after
    assert capsys.readouterr().err == ""


def test_an_installation_without_its_drafter_says_so(made, monkeypatch):
    monkeypatch.setattr(default_pair, "packaged_drafter", lambda name: None)
    with pytest.raises(StoreError, match="lacks the drafter omnidraft-tiny"):
        default_pair.default_bundle(None, accept_terms=False)
    assert not made


def test_two_processes_at_once_make_one_bundle(made, drafter, monkeypatch, capsys):
    """The second waits for the first, says so, and uses what that one made."""
    is_making, is_waiting, make = threading.Event(), threading.Event(), default_pair._make

    def slowly(*arguments):
        is_making.set()
        assert is_waiting.wait(20)
        make(*arguments)

    monkeypatch.setattr(default_pair, "_make", slowly)
    monkeypatch.setattr(default_pair, "_say_busy", is_waiting.set)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(default_pair.default_bundle, None, accept_terms=False)
        assert is_making.wait(20)
        second = pool.submit(default_pair.default_bundle, None, accept_terms=False)
        assert first.result(20) == second.result(20)
    assert made == ["smollm2-135m"]


def test_an_interrupted_making_is_taken_up_by_the_next_command(made, drafter, monkeypatch):
    make = default_pair._make

    def interrupted(bundle, target, accept_terms):
        bundle.with_name(bundle.name + ".partial").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(default_pair, "_make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_pair.default_bundle(None, accept_terms=False)
    monkeypatch.setattr(default_pair, "_make", make)
    bundle = default_pair.default_bundle(None, accept_terms=False)
    assert made == ["smollm2-135m"]
    assert open_bundle(bundle)


def test_a_damaged_default_bundle_is_made_again(made, drafter, capsys):
    bundle = default_pair.default_bundle(None, accept_terms=False)
    (bundle / "manifest.json").write_text("{")
    assert default_pair.default_bundle(None, accept_terms=False) == bundle
    assert made == ["smollm2-135m"] * 2
    assert "making it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "learning",
    [
        {},
        {"lora_rank": 8},
        {"batch": 4},
        {"length": 16},
        {"lora_rank": 16, "inputs": ["pieces"]},
    ],
    ids=str,
)
def test_a_default_bundle_that_learns_by_other_steps_is_made_again(made, drafter, learning, capsys):
    """Such as one from before there was learning, or before its rank, shape or loss was the
    default; of the loss its first lesson said to export again, which `run` does not let one do."""
    bundle = default_pair.default_bundle(None, accept_terms=False)
    edit_drafter(bundle, **learning)
    assert default_pair.default_bundle(None, accept_terms=False) == bundle
    assert made == ["smollm2-135m"] * 2
    told = capsys.readouterr().err
    assert told.count("was made to learn by other steps; making it again") == 1
    assert default_pair.default_bundle(None, accept_terms=False) == bundle
    assert made == ["smollm2-135m"] * 2


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-0123456789ab"])
def test_a_default_bundle_named_by_an_earlier_rule_is_kept_but_not_used(
    made, drafter, name, capsys
):
    """Neither the target alone nor the drafter alone says what a bundle learns."""
    wanted = default_pair.default_bundle(None, accept_terms=False)
    older = wanted.rename(wanted.with_name(name))
    assert default_pair.default_bundle(None, accept_terms=False) == wanted != older
    assert made == ["smollm2-135m"] * 2
    assert older.is_dir()
    assert f"{older} was made with another drafter or version" in capsys.readouterr().err


def write_model(folder):
    """A folder that looks like a model from outside."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))
    return folder


def bundle_of(target):
    return default_pair.default_bundle(str(target), accept_terms=False)


def test_a_model_that_is_named_by_its_path_is_exported_once(made, drafter, tmp_path, monkeypatch):
    """However the path is written; another folder of the same name is another model."""
    model = write_model(tmp_path / "one" / "model")
    first = bundle_of(model)
    monkeypatch.chdir(tmp_path / "one")
    assert bundle_of("model") == bundle_of("./model") == bundle_of("../one/model") == first
    assert made == [str(model)]
    other = bundle_of(write_model(tmp_path / "two" / "model"))
    assert other != first
    assert other.name.startswith("model-")
    drafter.write_bytes(b"two")
    assert bundle_of(model) not in (first, other)
    assert len(made) == 3


@pytest.mark.parametrize("change", ["size", "time", "document", "new file"])
def test_a_model_that_has_changed_is_exported_again(made, drafter, tmp_path, capsys, change):
    model = write_model(tmp_path / "model")
    bundle = bundle_of(model)
    assert capsys.readouterr().err == ""
    weights = model / "model.safetensors"
    if change == "size":
        weights.write_bytes(bytes(65))
    elif change == "time":
        os.utime(weights, ns=(0, 0))
    elif change == "document":
        (model / "config.json").write_text("[]")
    else:
        (model / "tokenizer.json").write_text("{}")
    assert bundle_of(model) == bundle_of(model) == bundle
    assert made == [str(model)] * 2
    assert capsys.readouterr().err.count(f"{model} has changed; exporting it again") == 1


def test_a_gguf_file_and_a_pulled_model_are_taken_as_well(made, drafter, tmp_path):
    gguf = tmp_path / "some.model.gguf"
    gguf.write_bytes(b"GGUF")
    assert bundle_of(gguf).name.startswith("some.model-")
    pulled = write_model(hub_path("maker/model"))
    bundle_of("maker/model")
    assert made == [str(gguf), str(pulled)]


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("./nothing", StoreError, "nothing does not exist: check the path"),
        ("nothing.gguf", StoreError, "nothing.gguf does not exist: check the path"),
        ("maker/model", StoreError, "get it with omnidraft-npu pull maker/model"),
        ("nobody", ConfigError, "there is no default pair for target 'nobody'"),
        ("bundle", ConfigError, "is a bundle, not a model: give it as --bundle"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(
    made, drafter, tmp_path, monkeypatch, target, error, words
):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        bundle_of(target)
    assert not made


def test_a_changed_model_that_cannot_be_exported_is_an_error(made, drafter, tmp_path, monkeypatch):
    """What was exported before is another model."""
    model = write_model(tmp_path / "model")
    bundle_of(model)
    (model / "config.json").write_text("broken")
    monkeypatch.setattr(default_pair, "_make", fail)
    with pytest.raises(StoreError, match="no network"):
        bundle_of(model)


def fail(*_):
    raise StoreError("no network")


@pytest.mark.parametrize("kind", ["learns otherwise", "another drafter"])
def test_a_default_bundle_that_cannot_be_made_again_answers_as_it_is(
    made, drafter, monkeypatch, capsys, kind
):
    before = default_pair.default_bundle(None, accept_terms=False)
    if kind == "another drafter":
        drafter.write_bytes(b"two")
    else:
        edit_drafter(before, lora_rank=8)
    monkeypatch.setattr(default_pair, "_make", fail)
    assert default_pair.default_bundle(None, accept_terms=False) == before
    assert f"cannot be made now (no network): {before} is used" in capsys.readouterr().err
    (before / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="no network"):
        default_pair.default_bundle(None, accept_terms=False)
