"""`omnidraft-npu inspect`: a table that breaks no word."""

import io
import json
import sys

import pytest
from click.testing import CliRunner
from npu_bundle import write_npu_bundle
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


REPORT = {
    "tokens": 1024,
    "relative_error": 0.142,
    "top_1_agreement": 0.754,
    "float_perplexity": 36.478,
    "perplexity": 38.285,
    "error_after_layer_29": 0.183,
    "error_after_layer_3": 0.086,
}


def of_npu(tmp_path, **changes):
    """The lines about the NPU's graphs of a bundle whose drafter has these figures."""
    bundle = write_npu_bundle(tmp_path / "bundle")
    document = json.loads((bundle / "manifest.json").read_text())
    document["drafter"]["htp"] |= changes
    (bundle / "manifest.json").write_text(json.dumps(document))
    lines = CliRunner().invoke(cli, ["inspect", str(bundle)]).stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("tiny on the NPU:"))
    return lines[start : start + 3]


def test_what_quantisation_costs_is_shown_with_what_it_was_calibrated_on(tmp_path):
    graphs, calibration, cost = of_npu(
        tmp_path, report=REPORT, is_accurate=True, calibration="mine.jsonl: 9 prompts"
    )
    assert graphs == "tiny on the NPU: fp16 graphs of 1, 4, 16 tokens"
    assert calibration == "  calibrated on mine.jsonl: 9 prompts"
    assert cost == (
        "  quantisation: accurate, within the bounds of its recipe; perplexity 38.28 where floats "
        "have 36.48 (+5.0 %); the same first choice after 75.4 % of 1,024 tokens; relative error "
        "of the logits 0.142; it grows most over layers 29 (0.183), 3 (0.086)"
    )


@pytest.mark.parametrize(
    ("is_accurate", "words"),
    [(False, "NOT accurate, outside the bounds of its recipe"), (None, "not measured")],
)
def test_graphs_that_are_poor_or_unmeasured_are_not_taken_for_good(tmp_path, is_accurate, words):
    _, calibration, cost = of_npu(tmp_path, is_accurate=is_accurate)
    assert cost == f"  quantisation: {words}"
    assert calibration == "  calibrated on nothing: its activations are floats"


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
