"""What a case may do: succeed, or fail in one line; and how a file is damaged for its block."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from click.testing import CliRunner, Result

from omnidraft_npu.cli import cli
from omnidraft_npu.errors import OmniDraftError

from .mutations import Mutator

EXIT_CODES = {0, 1, 2, 3, 4, 5, 130}


class WrongError(AssertionError):
    """The program did something else than to succeed, or to fail in one line."""


def call(function: Callable[[], object]) -> str:
    """Call a reader: `ok`, or the class of the error that it may raise."""
    try:
        function()
    except OmniDraftError as error:
        if not str(error):
            raise WrongError("an error without words") from error
        return type(error).__name__
    return "ok"


def command(*arguments: str, stdin: bytes | None = None) -> str:
    """Run a command line: `ok`, or its exit code."""
    return check_result(CliRunner().invoke(cli, list(arguments), input=stdin))


def check_result(result: Result) -> str:
    """Refuse a traceback, several lines of error, or what a terminal would obey."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in EXIT_CODES:
        raise WrongError(f"exit code {result.exit_code}")
    lines = result.stderr.splitlines()
    errors = [i for i, line in enumerate(lines) if line.startswith("Error:")]
    if result.exit_code in (1, 2, 4, 5) and errors != [len(lines) - 1]:
        raise WrongError(f"exit code {result.exit_code} with {result.stderr[:600]!r}")
    for text in (result.stderr, result.stdout):
        if bad := [c for c in text if not c.isprintable() and c != "\n"]:
            raise WrongError(f"{bad[0]!r} in the output {text[:300]!r}")
    if max(map(len, lines), default=0) > 4000:
        raise WrongError(f"a line of {max(map(len, lines))} characters")
    return "ok" if result.exit_code == 0 else f"exit {result.exit_code}"


@contextlib.contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """Other bytes in a file, for the block."""
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        yield
    finally:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(before)


def damaged(mutator: Mutator, path: Path, data: bytes) -> bytes:
    """Damage that fits what a file is."""
    if path.suffix in (".json", ".jsonl"):
        try:
            return mutator.json(json.loads(data))
        except ValueError:
            return mutator.bytes(data)
    if path.suffix == ".safetensors":
        return mutator.safetensors(data)
    return mutator.bytes(data)
