"""An error of the operating system is one line that names the file, in every command."""

import errno
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnidraft_npu.cli import cli
from omnidraft_npu.commands import inspect

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def fails(*arguments, code=1, **options):
    """The one line of a command that fails."""
    done = CliRunner().invoke(cli, list(map(str, arguments)), **options)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def raising(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(inspect, "open_bundle", fail)


@pytest.mark.parametrize(
    "name",
    [
        "ENAMETOOLONG",
        "ENOTDIR",
        "ELOOP",
        "EISDIR",
        "EROFS",
        "ETXTBSY",
        "ESTALE",
        "EIO",
        "ENOSPC",
        "EACCES",
        "ENOENT",
        "EBUSY",
    ],
)
def test_an_error_with_a_file_name_is_one_line_with_name_cause_and_remedy(monkeypatch, name):
    number = getattr(errno, name, errno.EIO)  # Windows lacks some.
    raising(monkeypatch, OSError(number, os.strerror(number), "some/file"))
    line = fails("inspect", "x")
    assert line.startswith(f"Error: some/file cannot be used ({os.strerror(number)}): ")
    assert len(line.rpartition(": ")[2]) > 10


def test_an_error_with_two_file_names_tells_both(monkeypatch):
    raising(monkeypatch, OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"))
    assert fails("inspect", "x").startswith("Error: a and b cannot be used (Invalid cross-device")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("name", [None, "some/file"])
def test_too_many_open_files_are_called_that(monkeypatch, number, name):
    raising(monkeypatch, OSError(number, os.strerror(number), name))
    assert "too many files are open" in fails("inspect", "x")


def test_an_error_without_a_file_name_may_be_a_bug_and_keeps_its_trace(monkeypatch):
    raising(monkeypatch, OSError(errno.EINVAL, "Invalid argument"))
    assert isinstance(CliRunner().invoke(cli, ["inspect", "x"]).exception, OSError)


COMMANDS = [
    ["run", "-b", "{}", "hi"],
    ["run", "-f", "{}"],
    ["inspect", "{}"],
    ["bench", "--prompts", "{}"],
    ["verify", "--prompts", "{}"],
    ["verify", "-b", "{}"],
    ["export", "--drafter", "{}", "--target", "{}", "-o", "never"],
    pytest.param(["distill", "--target", "{}", "-o", "never"], marks=needs_torch),
    ["adapters", "list", "{}"],
    ["adapters", "forget", "{}", "--yes"],
    ["cache", "show", "{}"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_names_that_are_too_long_and_paths_through_files_are_one_line(command, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for path in ("x" * 300, file / "x"):
        done = CliRunner().invoke(cli, [part.format(path) for part in command])
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code in (1, 5)
        assert len(done.stderr.splitlines()) == 1
    assert not Path("never").exists()


@posix
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_links_in_a_circle_pipes_and_names_that_are_no_text_are_one_line(command, tmp_path):
    loop, pipe, name = tmp_path / "loop", tmp_path / "pipe", os.fsdecode(b"\xff")
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    for path in (loop, pipe, tmp_path / name):
        done = CliRunner().invoke(cli, [part.format(path) for part in command])
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code in (1, 5)
        (line,) = done.stderr.splitlines()
        assert line.isprintable()


@posix
@pytest.mark.parametrize("command", ["export", pytest.param("distill", marks=needs_torch)])
def test_an_output_that_is_a_link_in_a_circle_is_one_line(command, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name in ("drafter", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    drafter = ["--drafter", tmp_path / "drafter"] if command == "export" else []
    assert fails(command, *drafter, "--target", tmp_path / "target", "-o", loop)


@posix
def test_a_prompt_may_come_through_a_pipe_and_a_pipe_without_a_writer_is_refused(tmp_path):
    from omnidraft_npu.errors import PromptError
    from omnidraft_npu.prompt_text import read_prompt_file

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PromptError, match="a pipe that nothing writes to"):
        read_prompt_file(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"hello\n" * 50_000,))
    writer.start()
    assert read_prompt_file(pipe) == b"hello\n" * 50_000
    writer.join()
    # As a shell's <(…) gives one.
    out, into = os.pipe()
    os.write(into, b"hello")
    os.close(into)
    assert read_prompt_file(Path(f"/dev/fd/{out}")) == b"hello"
    os.close(out)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_file_without_an_end_is_refused():
    import omnidraft_npu.prompt_text as module

    before = module.MAX_BYTES
    module.MAX_BYTES = 2**20
    try:
        assert "/dev/zero holds more than 1 MiB" in fails("run", "-f", "/dev/zero")
        assert "/dev/zero holds more than 1 MiB" in fails("bench", "--prompts", "/dev/zero")
    finally:
        module.MAX_BYTES = before


@posix
def test_names_that_are_no_utf8_are_one_line_in_a_real_process(tmp_path):
    folder = tmp_path / os.fsdecode(b"b\xff")
    folder.mkdir()
    command = [sys.executable, "-m", "omnidraft_npu", "inspect", folder]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 5
    assert rb"b\xff holds no manifest.json" in done.stderr
