"""The command line around its commands: how it is started, and how it ends when it cannot go on."""

import os
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
