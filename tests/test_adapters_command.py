"""`omnidraft-npu adapters` on a tiny bundle that has learned something."""

import errno
import json
import re
import shlex
import shutil

import pytest
from adapters_given import (
    assert_one_line,
    key_of,
    learn,
    run,
    store_of,
    tensors,
    write_adaptable_bundle,
)
from click.testing import CliRunner
from decoder_graphs import HIDDEN, RANK

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.commands.adapters import command
from omnidraft_npu.runtime.adapter_files import write_adapter
from omnidraft_npu.runtime.adapter_store import AdapterStore
from omnidraft_npu.runtime.learner_state import Progress, training_path, write_training
from omnidraft_npu.state_folder import adapters_path, learning, replay_path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_adaptable_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def bundle(made, tmp_path):
    return shutil.copytree(made, tmp_path / "bundle")


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


def test_forget_of_one_target_erases_it_all_and_reports_how_many_bytes(bundle):
    learn(bundle)
    learn(bundle, "same")
    found = sum(p.stat().st_size for p in (bundle / "state").rglob("other/*"))
    (adapters_path(bundle, "other") / ".v0004.json.x.tmp").write_bytes(b"half")
    what = f"3 adapters, 1 examples and 0 n-gram caches for other, {found + 4:,} bytes"
    asked = run("forget", bundle, "--target", "other", input="n\n")
    assert asked.exit_code == 1
    assert f"Erase {what}?" in asked.stderr
    assert store_of(bundle).current == 3
    erased = run("forget", bundle, "--target", "other", input="y\n")
    assert erased.exit_code == 0
    assert f"erased {what}" in erased.stderr
    assert not list((bundle / "state").rglob("other*"))
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
