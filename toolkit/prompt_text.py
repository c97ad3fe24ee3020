"""The text of a prompt from a file or a stream: bounded, UTF-8, without the line end after it."""

import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

from .errors import PromptError

MAX_BYTES = 256 * 2**20
"""More than any context holds; what is larger, or endless, is no file of prompts."""
_WRITER_S = 1.0
"""How long a pipe may be without a writer."""


def read_prompt_file(path: Path) -> bytes:
    """The bytes of a file, or of a pipe that something writes to.

    Raises:
        PromptError: it cannot be read, is too large, or is a pipe without a writer.
    """
    try:
        # Opening a pipe to which nothing writes would wait for ever.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as file:
            first = b""
            if os.name == "posix":
                first = _first_byte(handle, path)
                os.set_blocking(handle, True)
            return first + read_stream(file, str(path))
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}") from error


def read_stream(file: BinaryIO, where: str) -> bytes:
    """All bytes of a stream; raises `PromptError` where it holds more than `MAX_BYTES`."""
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise PromptError(f"{where} holds more than {MAX_BYTES // 2**20} MiB: give a part of it")
    return data


def decode_prompt(data: bytes, where: str) -> str:
    """The text without a byte order mark; raises `PromptError` where it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where} is not UTF-8 text (byte {error.start} is "
            f"0x{error.object[error.start]:02x}): convert it first"
        ) from error


def without_line_end(text: str) -> str:
    """The text without the one line end that editors and `echo` put after it."""
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _first_byte(handle: int, path: Path) -> bytes:
    """The first byte where that is a pipe that holds one; refuses a pipe without a writer."""
    if not stat.S_ISFIFO(os.fstat(handle).st_mode):
        return b""
    last = time.monotonic() + _WRITER_S
    while True:
        try:
            if first := os.read(handle, 1):
                return first
        except BlockingIOError:  # There is a writer, which has written nothing yet.
            return b""
        if time.monotonic() > last:
            raise PromptError(f"{path} is a pipe that nothing writes to: name a file")
        time.sleep(0.02)
