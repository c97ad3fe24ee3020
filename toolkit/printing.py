"""The lines that the command line prints; the model's own text is the only one left as it is.

File names, names in a bundle and what a user typed can hold escape sequences that a terminal
would obey, or characters that reorder or hide the text around them.
"""

import json
import logging
import re
from typing import Any

import click

_LONGEST_VALUE, _HEAD, _TAIL = 160, 100, 40
"""Characters of a value that an error repeats, and what is left of a longer one."""
_LONGEST_LINE = 1000
_NOT_ASCII = re.compile(r"[^ -~\n]")
_VALUE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S+")


def printable(text: str) -> str:
    r"""The text with every character that is not printable as an escape such as ``\x1b``.

    Line ends are among them, and so are the characters that stand for undecodable bytes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def one_line(text: str) -> str:
    """The text of an error or a warning: printable, on one line, long values cut in the middle."""
    words = " ".join(_cut(text, 20 * _LONGEST_LINE).split())
    short = _VALUE.sub(lambda found: _cut(found[0], _LONGEST_VALUE, _HEAD, _TAIL), words)
    return printable(_cut(short, _LONGEST_LINE))


def echo(line: str = "", *, err: bool = False) -> None:
    """Print one line on stdout, or on stderr."""
    click.echo(printable(line), err=err)


def echo_json(document: dict[str, Any]) -> None:
    """Print a JSON document on stdout, in which characters that are not printable are escaped."""
    text = json.dumps(document, ensure_ascii=False, indent=2)
    click.echo(_NOT_ASCII.sub(_json_escape, text))


def echo_model_text(text: str) -> None:
    """Print the text of a model on stdout, unchanged and without a line end."""
    click.echo(text, nl=False)


class EchoHandler(logging.Handler):
    """Prints every record as one line on stderr, wherever that leads now."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        try:
            click.echo(one_line(self.format(record)), err=True)
        except Exception:  # noqa: BLE001  # as every handler of the standard library
            self.handleError(record)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # Python's stand-in for an undecodable byte
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def _json_escape(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def _cut(text: str, longest: int, head: int | None = None, tail: int | None = None) -> str:
    """The text, or its head and tail with a mark between where it is longer than `longest`."""
    if len(text) <= longest:
        return text
    head = longest * 7 // 10 if head is None else head
    tail = longest // 4 if tail is None else tail
    return f"{text[:head]}…{text[-tail:]}"
