"""Every command shown to users is one that the command line accepts."""

import re
import shlex
from pathlib import Path

import click
import pytest

from omnidraft_npu.cli import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_in(text: str) -> list[list[str]]:
    """Argument lists of every `omnidraft-npu` call in shell blocks and help examples."""
    found = []
    for line in text.splitlines():
        for part in re.split(r"&&|\|", line):
            match = re.match(r"\s*(?:\S*/)?omnidraft-npu\s+(.+)", part)
            if match and not line.startswith(("|", "#", "*")):
                found.append(shlex.split(match[1], comments=True))
    return found


def shell_blocks(path: Path) -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))


def subcommands():
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", c) for inner, c in command.commands.items())


def check(arguments: list[str]) -> None:
    """Parse, do not run."""
    if arguments in (["--help"], ["--version"]):
        return
    command, context = cli, click.Context(cli)
    while isinstance(command, click.Group):
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name!r}"
        command = found
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_parse(path):
    for arguments in commands_in(shell_blocks(path)):
        check(arguments)


def test_the_readme_shows_commands():
    shown = {arguments[0] for arguments in commands_in(shell_blocks(ROOT / "README.md"))}
    assert {"run", "pull", "export", "inspect"} <= shown


def test_every_command_has_examples_that_parse():
    for name, command in subcommands():
        if isinstance(command, click.Group):
            continue
        examples = commands_in((command.help or "").partition("Examples:")[2])
        assert examples, f"{name} --help has no examples"
        for arguments in examples:
            assert " ".join(arguments).startswith(name)
            check(arguments)


def test_every_test_that_a_report_names_exists():
    file = None
    for report in (ROOT / "docs" / "reports").glob("*.md"):
        named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", report.read_text(encoding="utf-8"))
        for path, name in named:
            file = ROOT / path if path else file
            if path or name:
                assert file is not None and file.is_file(), f"{report.name}: {path}"
            if name:
                assert f"def {name}(" in file.read_text(encoding="utf-8"), f"{report.name}: {name}"
