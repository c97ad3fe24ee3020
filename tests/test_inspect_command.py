"""`omnidraft-npu inspect`: a table that breaks no word."""

import io
import sys

from click.testing import CliRunner
from rich.console import Console
from tiny_bundle import write_bundle

from omnidraft_npu.cli import cli
from omnidraft_npu.commands.tables import make_table, table_console

WORDS = ("architecture", "vocabulary", "cpu fp32", "ends at", "drafter", "target")


def test_a_pipe_gets_whole_words_and_a_whole_path(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    bundle = write_bundle(tmp_path / ("long" * 30), eos=())
    shown = CliRunner().invoke(cli, ["inspect", str(bundle)]).stdout
    lines = shown.splitlines()
    assert lines[0] == f"{bundle} (format 1)"
    for word in WORDS:
        assert any(word in line for line in lines[1:]), word


def test_a_pipe_is_wide_and_a_terminal_is_as_wide_as_it_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert table_console().width == 160
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert table_console().width == 80


def test_only_long_columns_are_wrapped():
    table = make_table(("short", "long"), long=("long",))
    table.add_row("1,234.5 MB", "some words that go on")
    output = io.StringIO()
    Console(file=output, width=18).print(table)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    assert lines[1:] == [
        "1,234.5 MB some",
        "           words",
        "           that",
        "           go on",
    ]
