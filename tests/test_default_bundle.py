"""Every command that decodes takes the default bundle where none is named."""

import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from omnidraft_npu.cli import cli
from omnidraft_npu.commands import default_pair

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
