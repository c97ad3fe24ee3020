"""What the command line prints: no control character but the model's own gets to a terminal."""

import json
import logging

import pytest
from click.testing import CliRunner
from tiny_bundle import write_bundle

from omnidraft_npu.cli import cli
from omnidraft_npu.commands.progress import stage_progress
from omnidraft_npu.commands.tables import make_console, make_table
from omnidraft_npu.printing import EchoHandler, echo_json, one_line, printable

HOSTILE = "a\x1b]0;title\x07\x9b31m\x7f\r\n\u202e\u2066\u2028\u200b\udcff\ud800b"
ESCAPED = r"a\x1b]0;title\x07\x9b31m\x7f\r\n\u202e\u2066\u2028\u200b\xff\ud800b"  # \udcff: a byte


def test_every_kind_of_unprintable_character_is_escaped_and_other_text_is_left_alone():
    assert printable(HOSTILE) == ESCAPED
    plain = "C:\\models\\x é 日本語 – … 🙂"
    assert printable(plain) == plain


def test_json_for_programs_is_the_same_document_without_a_control_character(capsys):
    document = {"text": HOSTILE, "more": "é 日本 🙂", "list": [HOSTILE]}
    echo_json(document)
    shown = capsys.readouterr().out
    assert json.loads(shown) == document
    assert shown.replace("\n", "").isprintable()
    assert "é 日本 🙂" in shown


@pytest.mark.parametrize(
    "message",
    [
        "no model is called '" + "x" * 100_000 + "': use another",
        "no model is called '" + "x y " * 50_000 + "': use another",
        "no file " + "/x" * 60_000 + " is there: use another",
        "no file " + "x " * 60_000 + " is there: use another",
        'quoted "' + "'" * 60_000 + '": use another',
        "many\n" * 60_000 + ": use another",
    ],
)
def test_an_error_repeats_a_bounded_part_of_a_value_and_still_ends_with_its_remedy(message):
    short = one_line(message)
    assert len(short) <= 1000
    assert short.endswith(": use another")
    assert short[:5] == message[:5].replace("\n", " ")


def test_a_message_of_common_length_is_repeated_whole():
    message = f"{'/folder' * 20}/file.json is not 'what it has to be': use another"
    assert one_line(message) == message


def test_warnings_are_one_printable_line(capsys):
    EchoHandler().handle(logging.makeLogRecord({"msg": "%s is odd", "args": (HOSTILE,)}))
    told = capsys.readouterr().err
    assert told.endswith("is odd\n")
    assert told.removesuffix("\n").isprintable()


def test_tables_show_names_as_they_are_without_markup_or_control_characters(capsys):
    table = make_table(["name"], long=["name"])
    for name in ("[red]x[/red]", "[/nothing]", ":smile:", "a\x1b[31mb\x07\nc"):
        table.add_row(name)
    make_console(width=80).print(table)
    shown = capsys.readouterr().out
    assert [line.rstrip() for line in shown.splitlines()[1:]] == [
        "[red]x[/red]",
        "[/nothing]",
        ":smile:",
        r"a\x1b[31mb\x07\nc",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_of_stages_are_shown_as_they_are(capsys, monkeypatch, is_terminal):
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    with stage_progress() as report:
        report("exporting [/a]\x1b]0;b", 0, 1)
        report("exporting [/a]\x1b]0;b", 1, 1)
    told = capsys.readouterr().err
    assert r"exporting [/a]\x1b]0;b" in told
    assert "\x1b]" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--draft-length", "{}"],
        ["run", "--{}"],
        ["{}"],
        ["run", "--proposer", "{}"],
        ["run", "a", "{}"],
        ["run", "--top-k", "{}", "hi"],
        ["run", "--soc", "{}", "hi"],
        ["run", "-f", "{}"],
        ["run", "-b", "{}", "hi"],
        ["inspect", "{}"],
        ["pull", "{}"],
        ["export", "--drafter", "{}", "--target", "{}", "-o", "b"],
        ["distill", "--target", "{}", "-o", "b"],
        ["bench", "--prompts", "{}"],
        ["adapters", "list", "{}"],
        ["cache", "show", "{}"],
    ],
)
@pytest.mark.parametrize("value", [HOSTILE, "x" * 50_000], ids=["hostile", "long"])
def test_what_is_typed_is_repeated_short_and_printable(arguments, value):
    done = CliRunner().invoke(cli, [argument.format(value) for argument in arguments])
    assert done.exit_code in (1, 2, 5), done.output
    assert isinstance(done.exception, SystemExit)
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("Error: ")
    assert all(line.isprintable() for line in lines)
    assert len(lines[-1]) < 1100
    assert done.stdout == ""


def test_inspect_shows_the_values_of_a_manifest_without_control_characters(tmp_path):
    bundle = write_bundle(tmp_path / "bundle")
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tool_version"] = HOSTILE.replace("\udcff", "").replace("\ud800", "")
    manifest["drafter"]["architecture"] = "[/x]\x1b[2J"
    manifest["drafter"]["source"] = "\x1b[2J"
    path.write_text(json.dumps(manifest))
    for options in ([], ["--json"]):
        done = CliRunner().invoke(cli, ["inspect", str(bundle), *options])
        assert done.exit_code == 0, done.output
        assert done.stdout.replace("\n", "").isprintable()
    assert "[/x]" in done.stdout
