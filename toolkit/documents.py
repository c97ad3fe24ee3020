"""Documents from outside, parsed once into checked types.

A JSON document that did not come from this process (a manifest, a checkpoint's configuration,
a state file, a row of prompts) is read with one call, at the place where it enters::

    @dataclass(frozen=True, kw_only=True)
    class Request:
        seed: int
        ids: tuple[TokenId, ...] = ()

    request = read_document(path, Request, error=CheckpointError, advice="get the file again")

What comes back has exactly the annotated types, so that nothing behind it needs to look again.
Anything else is one `error`: the file, the key, what was expected there, and the advice.

Annotations are those of `msgspec`: dataclasses and `msgspec.Struct`, `int`, `float`, `str`,
`bool`, `None` and unions of them, `Literal`, `list`, `tuple`, `dict`, and `Any` for what is not
looked at. An `int` takes neither `true` nor `2.0`; a `float` takes integers too, never NaN or an
infinity. The ranges below (`TokenId`, `Count`, `Size`, ...) keep numbers within what numpy and
onnxruntime can hold; `Annotated[int, msgspec.Meta(ge=0, le=9)]` gives others. A rule between
fields goes into `__post_init__`, as a `ValueError` or `ConfigError`: its text becomes part of the
line. `Renamed` maps keys that are no Python names.

A format of ours passes `is_closed=True`, which refuses keys that the type does not have; in a
format of others keys that the type does not name are skipped.
"""

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from .errors import BundleError, OmniDraftError

T = TypeVar("T")

MAX_BYTES = 16 * 2**20
"""Largest document that is read unless the caller allows more."""

MAX_DEPTH = 100
"""Deepest nesting; `tokenizers` reads 128 levels, Python's own recursion ends near 1000."""

_TOO_DEEP = f"is nested over {MAX_DEPTH} levels deep"

_SHOWN = 80
"""Most characters of a document's own words that an error repeats."""

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
"""An id of a vocabulary."""
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""A number of things, or of bytes; exact in a float too."""
Size = Annotated[int, Meta(ge=1, lt=2**31)]
"""A dimension, a rank, a number of layers: 1 or more."""
Text = Annotated[str, Meta(min_length=1)]
"""A string that is not empty."""

_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def read_document(
    path: Path,
    kind: type[T],
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str = "export the bundle again",
    shown: str | None = None,
    is_closed: bool = False,
    max_bytes: int = MAX_BYTES,
) -> T:
    """The JSON document in a file, as an instance of `kind`.

    Args:
        path: A regular file of UTF-8, with or without a byte order mark.
        kind: What it must be; see the module.
        error: What is raised.
        advice: What the user should do about a document that does not fit.
        shown: How messages name the file; the whole path where None.
        is_closed: Refuse keys that `kind` does not have.
        max_bytes: Refuse larger files before they are read.

    Raises:
        OmniDraftError: of the class `error`; the file is missing, unreadable, too large, not
            JSON, or does not fit.
    """
    where = shown or str(path)
    data = read_bytes(path, error=error, advice=advice, shown=where, max_bytes=max_bytes)
    return parse_document(data, kind, where, error=error, advice=advice, is_closed=is_closed)


def parse_document(
    data: bytes | str,
    kind: type[T],
    where: str,
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str = "export the bundle again",
    is_closed: bool = False,
) -> T:
    """JSON as an instance of `kind`; `where` names it in messages.

    Raises:
        OmniDraftError: as for `read_document`.
    """
    try:
        if isinstance(data, str):
            data = data.encode()
        data = data.removeprefix(b"\xef\xbb\xbf")
        if is_closed or _may_be_deep(data):
            document = msgspec.json.decode(data)
            _check_depth(document)
            return _convert(document, kind, is_closed)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as problem:
        raise error(f"{where}{_reason(problem)}: {advice}") from problem


def convert_document(
    document: Any,
    kind: type[T],
    where: str,
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str = "export the bundle again",
    is_closed: bool = False,
) -> T:
    """A document that is already parsed, as an instance of `kind`; see `parse_document`."""
    try:
        _check_depth(document)
        return _convert(document, kind, is_closed)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise error(f"{where}{_reason(problem)}: {advice}") from problem


def read_bytes(
    path: Path,
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str = "export the bundle again",
    shown: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """The bytes of a regular file that is no larger than `max_bytes`.

    Raises:
        OmniDraftError: of the class `error`; the file is missing, unreadable, too large, or no
            regular file (a pipe would wait for a writer).
    """
    where = shown or str(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise error(f"{where} is not a regular file: {advice}")
        if found.st_size > max_bytes:
            raise error(
                f"{where} has {found.st_size} bytes, more than the {max_bytes} that such a file "
                f"may have: {advice}"
            )
        return path.read_bytes()
    except FileNotFoundError as problem:
        raise error(f"{where} does not exist: {advice}") from problem
    except ValueError as problem:  # a NUL in the name
        raise error(f"{where!r} is not the name of a file: {advice}") from problem
    except OSError as problem:
        raise error(f"{where} cannot be read ({problem.strerror}): {advice}") from problem


def _convert(document: Any, kind: type[T], is_closed: bool) -> T:
    value = msgspec.convert(document, kind)
    if is_closed:
        for key in _unknown_keys(document, msgspec.to_builtins(value), ""):
            raise msgspec.ValidationError(
                f"the key {_shortened(key)} is not known, another version may have written it"
            )
    return value


def _unknown_keys(document: Any, known: Any, where: str) -> Iterator[str]:
    """Paths of the keys in `document` that are not in what was read of it."""
    if isinstance(document, dict):
        for key, value in document.items():
            path = f"{where}.{key}" if where else str(key)
            if key in known:
                yield from _unknown_keys(value, known[key], path)
            else:
                yield path
    elif isinstance(document, list):
        for i, (value, other) in enumerate(zip(document, known, strict=True)):
            yield from _unknown_keys(value, other, f"{where}[{i}]")


def _may_be_deep(data: bytes) -> bool:
    return data.count(b"[") + data.count(b"{") > MAX_DEPTH


def _check_depth(document: Any) -> None:
    """Level by level, without recursion: what comes later may recurse."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise RecursionError


_PATH = re.compile(r" - at (?:`(key)` in )?`\$([^`]*)`$")
_EXPECTED = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `([^`]*)`)?", re.DOTALL)
_WORDS = {
    "Object missing required field": "has no",
    "Invalid enum value": "does not take the value",
    "Integer value out of range": "has a number that is out of range",
    "Number out of range": "has a number that is out of range",
}


def _reason(problem: Exception) -> str:
    """Why a document does not fit: the key, what must be there, what is there."""
    if isinstance(problem, RecursionError):
        return f" {_TOO_DEEP}"
    message = str(problem)
    if not isinstance(problem, msgspec.ValidationError):
        what = "UTF-8" if "utf-8" in message.lower() else "JSON"
        return f" is not {what} ({_shortened(message.removeprefix('JSON is malformed: '))})"
    key = ""
    if found := _PATH.search(message):
        message = message[: found.start()]
        path = found[2].lstrip(".").replace("[...]", ".*")
        key = f": a key of {path or 'it'}" if found[1] else f": {path}" if path else ""
    if expected := _EXPECTED.fullmatch(message):
        types = " or ".join(_NAMES.get(name, name) for name in expected[1].split(" | "))
        got = f", not {_NAMES.get(expected[3], expected[3])}" if expected[3] else ""
        return f"{key} must be {types}{expected[2]}{got}"
    for theirs, ours in _WORDS.items():
        if message.startswith(theirs):
            message = ours + message.removeprefix(theirs).replace("`", "'")
            return f"{key} {_shortened(message, 2 * _SHOWN)}"
    return f"{key}: {_shortened(message, 4 * _SHOWN)}"


def _shortened(text: str, limit: int = _SHOWN) -> str:
    """At most `limit` characters of `text`, what is not printable escaped."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else f"{text[:limit]}…"
