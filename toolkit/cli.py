"""`omnidraft-npu`: the command line. Commands are imported when they are called."""

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import click

from . import __version__
from .errors import OmniDraftError
from .printing import EchoHandler, echo, one_line
from .system_errors import describe_system_error, is_about_output

EXIT_INTERRUPTED = 130


class _OneLine(click.ClickException):
    """An error that the user can fix, as the command line shows it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(one_line(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click has it as a class variable


class _Group(click.Group):
    """Loads a command when it is named, and shows the toolkit's own errors as one line.

    Any other error is a bug and keeps its trace.
    """

    # name -> help line; the module of the same name in `commands` holds the command.
    COMMANDS: ClassVar[dict[str, str]] = {
        "run": "Answer a prompt, speculatively.",
        "export": "Turn a drafter and targets into a bundle.",
        "distill": "Train a small drafter for a target.",
        "verify": "Check that drafting leaves the target's text alone.",
        "bench": "Measure acceptance and speed-up, task by task.",
        "inspect": "Show what is in a bundle.",
        "adapters": "Show, move or erase what the drafter has learned.",
        "cache": "Show, join or shrink learned spellings.",
        "devices": "List the chips a bundle can be compiled for.",
        "doctor": "Check what of the NPU works on this machine.",
        "pull": "Bring a model into the local store.",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.COMMANDS:
            return None
        command = importlib.import_module(f".commands.{name}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.COMMANDS.items()))

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _printable_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_usage_errors():
                return super().invoke(ctx)
        except OmniDraftError as error:
            raise _OneLine(str(error), error.exit_code) from error
        except (KeyboardInterrupt, click.Abort, ImportError) as error:
            if isinstance(error, ImportError) and not _is_interruption(error):
                raise
            _check_threads()
            echo("interrupted", err=True)
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError:
            # The reader of our output is gone: nothing is left to say.
            _give_up_stdout()
            raise click.exceptions.Exit(0) from None

    def main(self, *args: Any, **options: Any) -> Any:
        if not args and options.get("args") is None:
            _start_again_in_utf8()
        try:
            return super().main(*args, **options)
        except Exception as error:
            message = describe_system_error(error)
            if message is None:
                raise
            if is_about_output(error):
                _give_up_stdout()
            echo(f"Error: {one_line(message)}", err=True)
            sys.exit(OmniDraftError.exit_code)


@contextlib.contextmanager
def _printable_usage_errors() -> Iterator[None]:
    """Let click's own messages repeat no value that is long or not printable."""
    try:
        yield
    except click.UsageError as error:
        raise click.UsageError(one_line(error.format_message()), error.ctx) from error


def _start_again_in_utf8() -> None:
    """Replace this process by one in Python's UTF-8 mode where the locale has another encoding.

    Paths and prompts are UTF-8 for the libraries in C, whatever the locale says.
    """
    if sys.platform != "win32" and sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _check_threads() -> None:
    """Raise `RuntimeError` where no thread can start: OpenBLAS then interrupts its own process."""
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def _is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error, as where it came while a library in C was loaded."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere: Python flushes it while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="omnidraft-npu")
def cli() -> None:
    """Large language models on Snapdragon, faster: one small drafter for any target.

    \b
    Examples:
      omnidraft-npu pull smollm2-135m
      omnidraft-npu export --drafter omnidraft-tiny --target smollm2-135m -o bundle
      omnidraft-npu run -b bundle "Name three rivers."
    """
    if sys.stdout is None:
        raise OmniDraftError("stdout is closed: send it to a file, or to the null device")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                encoding="utf-8", errors="strict" if stream is sys.stdin else "replace"
            )
    logging.basicConfig(format="%(message)s", handlers=[EchoHandler()])
