"""`omnidraft-npu adapters` on a tiny bundle that has learned something."""

import errno
import json
import os
import re
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from decoder_graphs import HEAD_DIM, HEADS, HIDDEN, LAYERS, RANK
from safetensors.numpy import load_file, save_file
from tiny_bundle import write_bundle

from omnidraft_npu.acceptance_head import head_shapes
from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.commands.adapters import command
from omnidraft_npu.runtime.adapter_files import AdapterKey, write_adapter
from omnidraft_npu.runtime.adapter_store import AdapterStore
from omnidraft_npu.runtime.learner_state import Progress, training_path, write_training
from omnidraft_npu.runtime.peft_files import WEIGHTS, read_peft
from omnidraft_npu.state_folder import adapters_path, learning, replay_path

SHAPES = {
    f"lora.layers.{i}.q_proj.{side}": shape
    for i in range(LAYERS)
    for side, shape in (("A", (HIDDEN, RANK)), ("B", (RANK, HEADS * HEAD_DIM)))
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = write_bundle(tmp_path_factory.mktemp("bundle"))
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["drafter"]["source"] = "omnidraft-tiny"
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "bundle")


def key_of(bundle, target="other"):
    opened = open_bundle(bundle)
    return AdapterKey.of(opened, opened.target(target))


def store_of(bundle, target="other"):
    return AdapterStore(adapters_path(bundle, target), key_of(bundle, target))


def tensors(seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def learn(bundle, target="other"):
    """Three versions, the last in use and the one before it better than its parent."""
    store = store_of(bundle, target)
    store.add(tensors(1), parent=0, num_examples=8, num_updates=2)
    facts = {"acceptance_before": 0.25, "acceptance_after": 0.375, "num_examples": 16}
    store.add(tensors(2), parent=1, **facts)
    store.add(tensors(3) | tensors(4, head_shapes(HIDDEN)), parent=2)
    store.use(3)
    replay_path(bundle, target).mkdir(parents=True)
    (replay_path(bundle, target) / "00000001.safetensors").write_bytes(b"an example")
    return store


def run(*arguments, **options):
    return CliRunner().invoke(cli, ["adapters", *map(str, arguments)], **options)


def assert_one_line(result, exit_code, words):
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert re.search(words, line), line


def test_list_shows_every_version_and_which_is_in_use(bundle):
    learn(bundle)
    shown = run("list", bundle)
    assert shown.exit_code == 0, shown.output
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert rows[0] == "version parent examples updates acceptance size origin"
    size = store_of(bundle).path(2).stat().st_size
    assert rows[2] == f"v0002 v0001 16 0 0.250 to 0.375 {size:,} learned"
    assert rows[3].startswith("v0003 in use v0002")
    assert rows[4].startswith("1 examples to learn from")


def test_list_as_json(bundle):
    learn(bundle)
    document = json.loads(run("list", bundle, "--json").stdout)
    assert document["schema_version"] == 1
    assert (document["target"], document["current"]) == ("other", 3)
    assert document["replay"] == {"examples": 1, "bytes": len(b"an example")}
    second = document["adapters"][1]
    assert [one["version"] for one in document["adapters"]] == [1, 2, 3]
    assert [one["in_use"] for one in document["adapters"]] == [False, False, True]
    assert (second["parent"], second["num_examples"], second["origin"]) == (1, 16, "learned")
    assert (second["acceptance_before"], second["acceptance_after"]) == (0.25, 0.375)
    assert second["bytes"] == store_of(bundle).path(2).stat().st_size


def test_a_target_that_learned_nothing_says_so(bundle):
    learn(bundle)
    shown = run("list", bundle, "--target", "same")
    assert shown.exit_code == 0
    assert "no adapter for same yet" in shown.stdout
    assert_one_line(run("show", bundle, "--target", "same"), 5, "no adapter is in use for same")
    assert_one_line(run("rollback", bundle, "--target", "same"), 5, "no adapter is in use")
    assert_one_line(run("export", bundle, "x", "--target", "same"), 5, "no adapter is in use")


def test_an_adapter_under_training_is_listed_as_such(bundle):
    """`run` said that it learned, and `list` right after only that there was no adapter yet."""
    learn(bundle)
    path = training_path(replay_path(bundle, "other"))
    for num_updates in (0, 1):
        write_training(path, Progress(num_updates=num_updates), tensors(), key_of(bundle))
        shown = run("list", bundle).stdout
        assert ("one adapter is under training" in shown) == (num_updates > 0)
        document = json.loads(run("list", bundle, "--json").stdout)
        assert document["is_training"] == (num_updates > 0)


@pytest.mark.parametrize("arguments", [("show", "0"), ("export", "x", "--version", "0")])
def test_version_0_is_told_to_be_none_while_another_is_in_use(bundle, arguments):
    """It said that no adapter was in use, which was wrong."""
    learn(bundle)
    result = run(arguments[0], bundle, *arguments[1:])
    assert_one_line(result, 5, "0 is the drafter without an adapter")


def test_show_gives_one_version(bundle):
    learn(bundle)
    document = json.loads(run("show", bundle, "v0002", "--json").stdout)
    assert (document["schema_version"], document["version"]) == (1, 2)
    assert document["tensors"]["lora.layers.0.q_proj.A"] == [HIDDEN, RANK]
    assert "with an acceptance head" in run("show", bundle).stdout
    assert "without an acceptance head" in run("show", bundle, "1").stdout
    assert_one_line(
        run("show", bundle, "9"), 5, "no adapter v0009: name one of v0001, v0002, v0003"
    )
    assert run("show", bundle, "newest").exit_code == 2


def test_a_version_for_another_rank_is_shown_and_said_to_be_of_no_use(bundle):
    """Showing what it was made for failed, as it was made for something else."""
    learn(bundle)
    path = bundle / "manifest.json"
    document = json.loads(path.read_text())
    document["drafter"]["graphs"]["cpu"]["lora_rank"] = 9
    path.write_text(json.dumps(document))
    shown = run("show", bundle, "1")
    assert shown.exit_code == 0
    assert f"of no use here: adapter v0001 was made for another rank ({RANK}, here 9)" in (
        " ".join(shown.stdout.split())
    )
    assert_one_line(run("rollback", bundle, "1"), 5, r"another rank .* name another version")


def test_a_damaged_version_is_said_and_the_others_listed(bundle, caplog):
    learn(bundle).path(3).write_bytes(b"half")
    document = json.loads(run("list", bundle, "--json").stdout)
    assert [one["version"] for one in document["adapters"]] == [1, 2]
    assert document["current"] == 2
    assert "v0003" in caplog.text
    assert_one_line(
        run("export", bundle, "x", "--version", "3"), 5, "changed .*one of v0001, v0002"
    )


def test_a_version_that_another_process_forgets_meanwhile_can_still_be_listed(bundle, monkeypatch):
    """Its size was looked up in a file that was gone."""
    records = learn(bundle).records()
    monkeypatch.setattr(AdapterStore, "records", lambda _: records)
    store_of(bundle).path(1).unlink()
    shown = run("list", bundle, "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["adapters"][0]["bytes"] == 0


def test_what_may_not_be_read_is_one_line(bundle, monkeypatch):
    """Where another user's `state/` was closed, `list`, `forget` and `run` ended in a trace."""

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "bundle/state")

    monkeypatch.setattr(AdapterStore, "records", denied)
    assert_one_line(run("list", bundle), 1, r"bundle/state cannot be used \(Permission denied\)")


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


def test_rollback_goes_to_the_parent_to_any_version_and_to_none(bundle):
    store = learn(bundle)
    assert run("rollback", bundle).exit_code == 0
    assert store.current == 2
    result = run("rollback", bundle, "0")
    assert "no adapter is in use for other, before it was version 2" in result.stderr
    assert store.current == 0
    assert run("rollback", bundle, "3").exit_code == 0
    assert store.current == 3
    assert_one_line(run("rollback", bundle, "9"), 5, "no adapter v0009")
    assert store.current == 3


def test_forget_erases_adapters_and_examples_of_one_target_and_says_how_many_bytes(bundle):
    learn(bundle)
    learn(bundle, "same")
    found = sum(p.stat().st_size for p in (bundle / "state").rglob("other/*"))
    (adapters_path(bundle, "other") / ".v0004.json.x.tmp").write_bytes(b"half")
    asked = run("forget", bundle, input="n\n")
    assert asked.exit_code == 1
    assert f"3 adapters and 1 examples for other, {found + 4:,} bytes" in asked.stderr
    assert store_of(bundle).current == 3
    assert run("forget", bundle, input="y\n").exit_code == 0
    assert not list(adapters_path(bundle, "other").iterdir())
    assert not list(replay_path(bundle, "other").iterdir())
    assert store_of(bundle, "same").current == 3
    assert "erased 3 adapters" in run("forget", bundle, "--target", "same", "--yes").stderr
    assert "erased 0 adapters" in run("forget", bundle, "--target", "same").stderr


def test_forget_without_an_answer_erases_nothing(bundle):
    learn(bundle)
    refused = run("forget", bundle, input="")
    assert refused.exit_code == 2
    assert "add --yes" in refused.stderr
    assert store_of(bundle).current == 3


@pytest.mark.parametrize(
    "arguments", [("rollback", "1"), ("forget", "--yes"), ("import", "x.onnx_adapter")]
)
def test_nothing_is_changed_while_another_learns(bundle, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    learn(bundle)
    assert run("export", bundle, "x.onnx_adapter").exit_code == 0
    name, *rest = arguments
    with learning(bundle, "other"):
        assert run("list", bundle).exit_code == 0
        refused = run(name, bundle, *rest)
    assert_one_line(refused, 1, "another process is learning for other")
    assert store_of(bundle).current == 3


def test_a_drafter_without_lora_inputs_takes_none(bundle, tmp_path):
    write_adapter(tmp_path / "x.onnx_adapter", tensors(), key_of(bundle))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["drafter"]["graphs"] = manifest["targets"]["other"]["graphs"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    assert_one_line(run("import", bundle, tmp_path / "x.onnx_adapter"), 5, "--lora-rank")


def test_no_exported_file_is_ever_changed(bundle, tmp_path):
    def exported():
        return {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file()}

    before = exported()
    learn(bundle)
    for arguments in (("export", bundle, tmp_path / "x"), ("import", bundle, tmp_path / "x")):
        assert run(*arguments).exit_code == 0
    assert run("rollback", bundle, "0").exit_code == 0
    assert run("forget", bundle, "--yes").exit_code == 0
    assert exported() == before
    open_bundle(bundle, verify=True)


def test_the_examples_of_the_help_run(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn(bundle)
    seen = 0
    for name in ("list", "show", "export", "import", "rollback", "forget"):
        text = command.commands[name].help
        for line in re.findall(r"omnidraft-npu (adapters .+)", text.partition("Examples:")[2]):
            arguments = shlex.split(line.replace("gemma3-270m", "other"))
            result = CliRunner().invoke(cli, arguments)
            assert result.exit_code == 0, (line, result.output)
            seen += 1
    assert seen == 14
