"""`omnidraft-npu adapters export` and `import`, on a tiny bundle that has learned something."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from adapters_given import (
    SHAPES,
    assert_one_line,
    key_of,
    learn,
    run,
    store_of,
    tensors,
    write_adaptable_bundle,
)
from decoder_graphs import HIDDEN, RANK
from safetensors.numpy import load_file, save_file

from omnidraft_npu.acceptance_head import head_shapes
from omnidraft_npu.runtime.adapter_files import write_adapter
from omnidraft_npu.runtime.peft_files import WEIGHTS, read_peft


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_adaptable_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "bundle")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_that_steers_a_terminal_is_recorded_without_what_steers(bundle, tmp_path):
    learn(bundle)
    path = tmp_path / "x\x1b[31m.onnx_adapter"
    assert run("export", bundle, path).exit_code == 0
    assert run("import", bundle, path).exit_code == 0
    assert store_of(bundle).record(4).origin == "onnx_adapter x[31m.onnx_adapter"


@pytest.mark.parametrize("name", ["for-peft", "x.onnx_adapter"])
def test_what_is_exported_is_imported_into_another_bundle_bit_for_bit(bundle, tmp_path, name):
    learned = learn(bundle)
    second = shutil.copytree(bundle, tmp_path / "second")
    shutil.rmtree(second / "state")
    result = run("export", bundle, tmp_path / name)
    assert result.exit_code == 0, result.output
    result = run("import", second, tmp_path / name)
    assert result.exit_code == 0, result.output
    assert "version 1 is in use for other" in result.stderr
    store = store_of(second)
    read, expected = store.load(store.current), learned.load(3)
    assert read.keys() == expected.keys()
    for tensor in expected:
        np.testing.assert_array_equal(read[tensor], expected[tensor])
    assert name in store.record(1).origin


def drop_marks(folder):
    """What PEFT makes of the file when it saves it again."""
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def test_import_tells_what_peft_says_and_what_is_missing(bundle, tmp_path):
    learn(bundle)
    for name, base in (("x", "their/model"), ("y", "models/omnidraft-tiny")):
        result = run("export", bundle, tmp_path / name, "--version", "2", "--base-model", base)
        assert result.exit_code == 0, result.output
        drop_marks(tmp_path / name)
    result = run("import", bundle, tmp_path / "x")
    assert "trained on 'their/model', this drafter came from omnidraft-tiny" in result.stderr
    assert "no acceptance head" in result.stderr
    assert "trained on" not in run("import", bundle, tmp_path / "y").stderr
    assert run("rollback", bundle).exit_code == 0
    assert run("rollback", bundle).exit_code == 0
    assert store_of(bundle).current == 3


def test_what_was_exported_for_this_drafter_is_not_said_to_be_of_another(bundle, tmp_path):
    """It was, where `--with-drafter` had written the drafter for PEFT to a folder."""
    learn(bundle)
    arguments = ("export", bundle, tmp_path / "x", "--with-drafter", tmp_path / "float")
    assert run(*arguments).exit_code == 0
    for _ in range(2):
        result = run("import", bundle, tmp_path / "x")
        assert result.exit_code == 0
        assert "trained on" not in result.stderr
        drop_marks(tmp_path / "x")


def test_an_adapter_of_some_modules_is_completed_so_that_the_rest_can_be_learned(bundle, tmp_path):
    part = {n: t for n, t in tensors().items() if "layers.0" in n}
    write_adapter(tmp_path / "x.onnx_adapter", part, key_of(bundle))
    result = run("import", bundle, tmp_path / "x.onnx_adapter")
    assert "2 tensors that it lacks start anew" in result.stderr
    read = store_of(bundle).load(1)
    assert np.all(read["lora.layers.1.q_proj.A"] != 0)
    assert not np.any(read["lora.layers.1.q_proj.B"])


OF_RANK_9 = tensors(
    0, {name: tuple(9 if n == RANK else n for n in shape) for name, shape in SHAPES.items()}
)
NAN = tensors() | {"lora.layers.0.q_proj.A": np.full((HIDDEN, RANK), np.nan, np.float32)}


@pytest.mark.parametrize(
    ("change", "given", "words"),
    [
        ({"drafter_sha256": "x"}, tensors(), "another drafter"),
        ({"target_tokenizer_sha256": "x"}, tensors(), "another target tokenizer"),
        ({}, OF_RANK_9, "rank 9, the drafter was exported with 2"),
        ({}, tensors(0, {"lora.layers.0.q_proj.A": (9, RANK)}), r"q_proj.A is \[9, 2\]"),
        ({}, tensors(0, {"lora.layers.7.q_proj.A": (HIDDEN, RANK)}), "layers.7"),
        ({}, tensors() | tensors(0, head_shapes(9)), "hidden states of 9"),
        ({}, tensors() | {"head.out.bias": np.zeros(1, np.float32)}, "no head"),
        ({}, NAN, "no numbers"),
        ({}, {}, "adapts nothing"),
        ({}, tensors(0, head_shapes(HIDDEN)), "adapts nothing"),
        ({}, {n: t for n, t in tensors().items() if "0.q_proj.A" not in n}, "one factor of .*0.q"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named_and_refused(bundle, tmp_path, change, given, words):
    path = tmp_path / "x.onnx_adapter"
    write_adapter(path, given, replace(key_of(bundle), **change))
    assert_one_line(run("import", bundle, path), 5, words)
    assert not (bundle / "state").exists()


def test_what_is_no_adapter_is_refused(bundle, tmp_path):
    (tmp_path / "x.onnx_adapter").write_bytes(b"no adapter at all")
    assert_one_line(run("import", bundle, tmp_path / "x.onnx_adapter"), 5, "can be read")
    assert_one_line(run("import", bundle, tmp_path / "y.onnx_adapter"), 5, "does not exist")
    assert_one_line(run("import", bundle, tmp_path), 5, "adapter_config.json")
    (tmp_path / WEIGHTS).write_bytes(b"")
    assert_one_line(run("import", bundle, tmp_path / WEIGHTS), 5, "a part .* or a folder")
    assert_one_line(run("import", bundle, os.devnull), 5, "is no file")


def test_an_adapter_of_another_target_is_refused_in_both_forms(bundle, tmp_path):
    learn(bundle)
    for name in ("x", "x.onnx_adapter"):
        assert run("export", bundle, tmp_path / name).exit_code == 0
        refused = run("import", bundle, tmp_path / name, "--target", "same")
        assert_one_line(refused, 5, "target tokenizer")


@pytest.mark.parametrize("inside", ["", "drafter", "new/learned.onnx_adapter"])
def test_export_writes_nothing_into_a_bundle_even_if_forced(bundle, made, inside):
    learn(bundle)
    before = sorted(bundle.rglob("*"))
    said = run("export", bundle, bundle / inside, "--force")
    assert_one_line(said, 2, "name a place of its own")
    assert_one_line(run("export", bundle, made, "--force"), 2, "name a place of its own")
    assert sorted(bundle.rglob("*")) == before


def test_export_replaces_nothing_unless_forced(bundle, tmp_path):
    learn(bundle)
    path = tmp_path / "x.onnx_adapter"
    path.write_bytes(b"mine")
    assert_one_line(run("export", bundle, path), 2, "--force")
    assert path.read_bytes() == b"mine"
    assert run("export", bundle, path, "--force").exit_code == 0
    refused = run("export", bundle, tmp_path / "y.onnx_adapter", "--base-model", "x")
    assert_one_line(refused, 2, "--base-model")
    (tmp_path / "file").write_text("")
    refused = run("export", bundle, tmp_path / "file" / "x.onnx_adapter")
    assert_one_line(refused, 1, "cannot write")
    (tmp_path / "empty").mkdir()
    assert run("export", bundle, tmp_path / "empty").exit_code == 0
    assert_one_line(run("export", bundle, tmp_path / "empty"), 2, "--force")
    assert run("export", bundle, tmp_path / "Z.ONNX_ADAPTER").exit_code == 0
    assert (tmp_path / "Z.ONNX_ADAPTER").is_file()


def test_the_place_that_cannot_be_written_is_named(bundle, tmp_path):
    """It was the adapter's where it was the drafter's."""
    learn(bundle)
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "drafter"
    refused = run("export", bundle, tmp_path / "x", "--with-drafter", folder)
    assert_one_line(refused, 1, "cannot write .*drafter")
    refused = run("export", bundle, tmp_path / ("x" * 500))
    assert_one_line(refused, 1, "cannot write x?.*too long")


def test_export_writes_the_drafter_that_peft_loads_the_adapter_on(bundle, tmp_path):
    learn(bundle)
    folder = tmp_path / "drafter"
    result = run("export", bundle, tmp_path / "x", "--with-drafter", folder)
    assert result.exit_code == 0, result.output
    assert (folder / "model.safetensors").stat().st_size > 40_000_000
    read = read_peft(tmp_path / "x", key=key_of(bundle), drafter="omnidraft-tiny")
    assert read.base_model == str(folder)


def test_the_drafter_is_not_written_where_it_is_of_no_use_or_harm(bundle, tmp_path):
    """Beside the adapter, transformers applied that as it loaded what was to be the drafter."""
    learn(bundle)
    file = tmp_path / "x.onnx_adapter"
    refused = run("export", bundle, file, "--with-drafter", tmp_path / "drafter")
    assert_one_line(refused, 2, "leave out --with-drafter")
    refused = run("export", bundle, tmp_path / "x", "--with-drafter", tmp_path / "x", "--force")
    assert_one_line(refused, 2, "give --with-drafter another")
    assert not any((tmp_path / name).exists() for name in ("x.onnx_adapter", "drafter", "x"))


def test_every_command_that_changes_something_reports_it_as_json(bundle, tmp_path):
    def document(*arguments):
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        found = json.loads(result.stdout)
        assert found.pop("schema_version") == 1
        return found

    learn(bundle)
    path = tmp_path / "x.onnx_adapter"
    written = {"target": "other", "version": 3, "path": str(path), "drafter": None}
    assert document("export", bundle, path) == written
    assert document("import", bundle, path) == {
        "target": "other",
        "current": 4,
        "base_model": None,
        "num_new_tensors": 0,
        "has_head": True,
    }
    assert document("rollback", bundle) == {"target": "other", "current": 3, "before": 4}
    assert document("rollback", bundle, "0") == {"target": "other", "current": 0, "before": 3}
    erased = document("forget", bundle, "--yes")
    assert erased.pop("bytes") > 0
    assert erased == {"targets": ["other"], "adapters": 4, "examples": 1, "caches": 0}
