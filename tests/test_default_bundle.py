"""Every command that decodes takes the default bundle where none is named."""

import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle
from tiny_checkpoints import write_checkpoint

from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.commands import default_pair
from omnidraft_npu.store import local

COMMANDS = {
    "run": ["a b"],
    "verify": ["--raw", "--per-task", "1"],
    "bench": ["--raw", "--per-task", "1", "--draft-tokens", "1", "--repeats", "1"],
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("default"), eos=())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_default_bundle_is_used_unless_one_is_named(bundle, monkeypatch, name):
    asked = []

    def default_bundle(target, *, accept_terms):
        asked.append((target, accept_terms))
        return bundle

    monkeypatch.setattr(default_pair, "default_bundle", default_bundle)
    command = [name, *COMMANDS[name], "--max-new-tokens", "2"]
    for options in ([], ["--target", "smollm2-135m", "--accept-terms"], ["-b", str(bundle)]):
        result = CliRunner().invoke(cli, [*command, *options])
        assert result.exit_code == 0, result.output
    assert asked == [(None, False), ("smollm2-135m", True)]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_target_without_a_default_pair_is_one_line(name):
    result = CliRunner().invoke(cli, [name, *COMMANDS[name], "--target", "nobody"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: there is no default pair for target 'nobody'")


@pytest.fixture
def tiny_drafter(tmp_path, monkeypatch):
    """A tiny model stands in for the drafter that ships."""
    folder = write_checkpoint(tmp_path / "tiny", vocab_size=280)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    for module in (default_pair, local):
        monkeypatch.setattr(module, "packaged_drafter", lambda name: folder)
    return folder


def test_run_takes_a_model_by_its_path_and_exports_it_once(tiny_drafter, tmp_path):
    model = write_checkpoint(tmp_path / "model", "qwen2", vocab_size=310, seed=1)
    command = ["run", "--target", str(model), "--raw", "--no-learn", "--max-new-tokens", "8"]
    first, second = (CliRunner().invoke(cli, [*command, "the small drafter"]) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert first.stdout == second.stdout
    assert "spelling" in first.stderr
    assert "spelling" not in second.stderr
    (bundle,) = (tmp_path / "home" / "bundles" / "own").glob("model-*-r16/")
    named = CliRunner().invoke(cli, ["run", "-b", str(bundle), *command[3:], "the small drafter"])
    assert named.stdout == first.stdout
    (model / "config.json").write_text("{")
    broken = CliRunner().invoke(cli, [*command, "the small drafter"])
    assert broken.exit_code == 1
    assert broken.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in broken.stderr


def test_a_model_in_place_of_a_bundle_is_pointed_at_the_right_option(tmp_path):
    model = write_checkpoint(tmp_path / "model", vocab_size=310)
    said = CliRunner().invoke(cli, ["run", "-b", str(model), "hi"])
    assert said.exit_code == 5
    assert "give this model as --target" in said.stderr


def test_an_export_without_a_drafter_takes_the_one_that_ships(tiny_drafter, tmp_path):
    model = write_checkpoint(tmp_path / "model", vocab_size=310, seed=1)
    options = ["-o", str(tmp_path / "bundle"), "--context-length", "128"]
    made = CliRunner().invoke(cli, ["export", "--target", str(model), *options])
    assert made.exit_code == 0, made.output
    assert open_bundle(tmp_path / "bundle").manifest.drafter.source == "omnidraft-tiny"


def test_what_was_learned_with_a_model_is_listed_by_the_models_name(tmp_path, monkeypatch):
    model = write_checkpoint(tmp_path / "model", vocab_size=280)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    assert CliRunner().invoke(cli, ["inspect", str(model)]).exit_code == 5
    run = ["run", "--target", str(model), "--raw", "--max-new-tokens", "2", "a b"]
    assert CliRunner().invoke(cli, run).exit_code == 0
    for command in (["inspect"], ["adapters", "list"]):
        shown = CliRunner().invoke(cli, [*command, str(model), "--json"])
        assert shown.exit_code == 0, shown.output
