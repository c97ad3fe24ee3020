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

import contextlib
import copy
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from .errors import BundleError, OmniDraftError

T = TypeVar("T")

MAX_BYTES = 4 * 2**20
"""Largest document that is read unless the caller allows more."""

MAX_DEPTH = 100
"""Deepest nesting; `tokenizers` reads 128 levels, Python's own recursion ends near 1000."""

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
        if not is_closed and data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.json.decode(data, type=kind)
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as problem:
        raise error(f"{where} {_unreadable(problem, data)}: {advice}") from problem
    return convert_document(document, kind, where, error=error, advice=advice, is_closed=is_closed)


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
    if _is_deep(document):
        raise error(f"{where} {_TOO_DEEP}: {advice}")
    try:
        value = msgspec.convert(document, kind)
    except msgspec.ValidationError as problem:
        reason = _misfit(copy.deepcopy(document), kind, str(problem))
        raise error(f"{where}{reason}: {advice}") from problem
    if is_closed:
        for place, key in _unknown_keys(document, msgspec.to_builtins(value), ""):
            raise error(
                f"{where}{place and ': '}{place} has the unknown key {shown_value(key)} (perhaps "
                f"another version wrote it): {advice}"
            )
    return value


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
    check_regular(path, error=error, advice=advice, shown=where, max_bytes=max_bytes)
    try:
        return path.read_bytes()
    except OSError as problem:
        raise error(f"{where} cannot be read ({problem.strerror}): {advice}") from problem


def check_regular(
    path: Path,
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str = "export the bundle again",
    shown: str | None = None,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Pass if `path` is a file that `read_bytes` would read; nothing is opened.

    Raises:
        OmniDraftError: as for `read_bytes`.
    """
    where = shown or str(path)
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise error(f"{where} cannot be read (it does not exist): {advice}") from problem
    except ValueError as problem:  # a NUL in the name
        raise error(f"{where!r} is not the name of a file: {advice}") from problem
    except OSError as problem:
        raise error(f"{where} cannot be read ({problem.strerror}): {advice}") from problem
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{where} is not a regular file: {advice}")
    if found.st_size > max_bytes:
        raise error(
            f"{where} has {found.st_size} bytes, more than the {max_bytes} that such a file may "
            f"have: {advice}"
        )


def _unknown_keys(document: Any, known: Any, where: str) -> Iterator[tuple[str, str]]:
    """Places and keys in `document` that are not in what was read of it."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in known:
                yield where, key
            else:
                yield from _unknown_keys(value, known[key], f"{where}.{key}".lstrip("."))
    elif isinstance(document, list):
        for i, (value, other) in enumerate(zip(document, known, strict=True)):
            yield from _unknown_keys(value, other, f"{where}[{i}]")


def _is_deep(document: Any) -> bool:
    """Looks level by level, without recursion: what comes later may recurse."""
    level = [document] if isinstance(document, _CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            # Mostly all are plain, which is seen at once.
            if not _CONTAINER_TYPES.isdisjoint(map(type, children)):
                inner += [child for child in children if isinstance(child, _CONTAINERS)]
        if not inner:
            return False
        level = inner
    return True


_CONTAINERS = (dict, list, tuple)
_CONTAINER_TYPES = frozenset(_CONTAINERS)
_TOO_DEEP = f"is nested over {MAX_DEPTH} levels deep"
_LONE_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2})"
)


def _unreadable(problem: Exception, data: bytes | str) -> str:
    if isinstance(problem, RecursionError):
        return _TOO_DEEP
    if "out of range" in str(problem):
        return "holds a number that is out of range"
    if isinstance(data, bytes) and _LONE_SURROGATE.search(data):
        return "is not JSON (it may hold half of a surrogate pair)"
    what = "UTF-8" if "utf-8" in str(problem).lower() else "JSON"
    return f"is not {what} ({shown_text(str(problem).removeprefix('JSON is malformed: '))})"


_PLACE = re.compile(r" - at (?:`(key)` in )?`\$([^`]*)`$")
_STEP = re.compile(r"\[(?:(\d+)|(\.\.\.))\]|\.([^.\[]+)")
_EXPECTED = re.compile(r"Expected `([^`]*)`(.*?)(?:, got `[^`]*`)?", re.DOTALL)


def _misfit(document: Any, kind: Any, message: str) -> str:
    """Where a document does not fit, what is there and what must be, in words.

    Args:
        document: May be changed.
        kind: What it should be.
        message: What `msgspec.convert` said.
    """
    found = _PLACE.search(message)
    rule = message[: found.start()] if found else message
    place, value = _locate(document, kind, message, found[2]) if found else ("", document)
    at = f": {shown_text(place)}" if place else ""
    if rule.startswith("Object missing required field"):
        return f"{at} lacks {rule.rpartition(' ')[2].replace('`', repr(chr(39))[1])}"
    if found and found[1]:
        return f"{at or ' '} has a key that does not fit ({shown_text(rule)})"
    if rule.startswith("Invalid enum value"):
        return f"{at} is {shown_value(value)}, which is not known"
    rule = rule.replace("`str` of length >= 1", "`str` that is not empty")
    if expected := _EXPECTED.fullmatch(rule):
        types = " or ".join(_NAMES.get(name, name) for name in expected[1].split(" | "))
        return f"{at} is {shown_value(value)}, must be {types}{expected[2]}"
    return f"{at}: {shown_text(rule, 4 * _SHOWN)}"


def _locate(document: Any, kind: Any, message: str, path: str) -> tuple[str, Any]:
    """The place that msgspec means by a path with `[...]` for any key, and what is there."""
    place, node = "", document
    for index, is_any, name in _STEP.findall(path):
        if is_any:
            name = _key_at_fault(document, kind, message, node)
        place += f"[{index}]" if index else f".{name}"
        try:
            node = node[int(index) if index else name]
        except (KeyError, IndexError, TypeError):  # a key with a dot in it
            return path.lstrip("."), None
    return place.lstrip("."), node


def _key_at_fault(document: Any, kind: Any, message: str, node: dict[str, Any]) -> str:
    """The first entry of `node` because of which `document` gives this message; only it stays."""
    items = list(node.items())
    while len(items) > 1:
        half = items[: len(items) // 2]
        node.clear()
        node.update(half)
        try:
            msgspec.convert(document, kind)
            is_in_half = False
        except msgspec.ValidationError as problem:
            is_in_half = str(problem) == message
        items = half if is_in_half else items[len(half) :]
    node.clear()
    node.update(items)
    return items[0][0]


def shown_value(value: Any) -> str:
    """A value of a document for a message: short, and printable."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return shown_text(repr(value))


def shown_text(text: str, limit: int = _SHOWN) -> str:
    """At most `limit` characters of a document's own words, what is not printable escaped."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else f"{text[:limit]}…"
