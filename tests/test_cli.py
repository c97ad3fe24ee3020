"""The command line around its commands: how it is started, and how it ends when it cannot go on."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from omnidraft_npu import __version__
from omnidraft_npu.cli import cli
from omnidraft_npu.commands import inspect

MODULE = [sys.executable, "-m", "omnidraft_npu"]


def test_the_package_runs_as_a_module(tmp_path):
    done = subprocess.run(
        [*MODULE, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"omnidraft-npu, version {__version__}\n"


WHILE_LOADING = ImportError("initialization failed")
WHILE_LOADING.__cause__ = KeyboardInterrupt()
"""What Ctrl-C came to while onnxruntime was loaded: it ended in a trace."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, click.Abort, WHILE_LOADING])
def test_an_interrupt_is_told_and_exits_130(monkeypatch, error):
    def interrupted(*_, **__):
        raise error

    monkeypatch.setattr(inspect, "open_bundle", interrupted)
    result = CliRunner().invoke(cli, ["inspect", "x"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["run", "--help"], ["pull", "--list"]])
def test_a_full_disk_under_stdout_is_one_line(arguments):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*MODULE, *arguments],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the output cannot be written (No space left on device)")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
def test_a_closed_stdout_is_one_line():
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *MODULE, "pull", "--list"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == "Error: stdout is closed: send it to a file, or to the null device\n"


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such locale")
def test_names_and_text_are_utf8_in_a_locale_that_is_not(tmp_path):
    from tiny_bundle import write_bundle

    bundle = write_bundle(tmp_path / "büñdle 日本")
    prompt = tmp_path / "prömpt.txt"
    prompt.write_text("abc é", encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    options = ["--raw", "--no-draft", "--no-learn", "--json", "--max-new-tokens", "2"]
    command = [*MODULE, "run", "-b", str(bundle), "-f", str(prompt), *options]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    missing = [*MODULE, "inspect", str(tmp_path / "ñ")]
    done = subprocess.run(missing, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 5
    assert "/ñ is not a directory" in done.stderr.decode()


FOLDERS = ("toolkit", "quantize", "runtime")
PRINTED_BY = "printing.py: click.echo"
TO_A_PARENT = {"compile_child.py: sys.stderr.write", "probe.py: sys.stdout.write"}


def _package_files():
    root = Path(__file__).parents[1]
    return [path for name in FOLDERS for path in root.glob(f"{name}/**/*.py")]


def test_nothing_is_printed_but_by_the_module_that_escapes():
    """Use `omnidraft_npu.printing.echo` and its siblings, and `tables.make_console`."""
    found = []
    for path in _package_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if re.fullmatch(r"click\.(echo|secho)|print|Console|sys\.std(out|err)\.write", name):
                found.append(f"{path.name}: {name}")
    assert PRINTED_BY in found
    assert set(found) <= {PRINTED_BY, *TO_A_PARENT}
