"""What to print for an error of the operating system, where it is not a bug of ours."""

import errno
import re

from .errors import ResourceError
from .memory import available_bytes, size_text

_REMEDIES = {
    errno.ENOENT: "check its name",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOTDIR: "a part of its path is a file where a folder must be",
    errno.EISDIR: "it is a folder: name a file",
    errno.ELOOP: "its links lead in a circle: name the file itself",
    errno.EROFS: "name a place that can be written",
    errno.ETXTBSY: "a program that runs uses it: end that, or name another place",
    errno.EACCES: "change who may read and write it, or name another place",
    errno.EPERM: "change who may read and write it, or name another place",
    errno.ENXIO: "nothing is at its other end: name a file",
    errno.ENODEV: "it is a device: name a file",
}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DISK = {errno.EIO, errno.ESTALE}
_NO_HANDLES = {errno.EMFILE, errno.ENFILE}
_OUTPUT = _NO_SPACE | {errno.EIO}
"""Errors of a place that takes no more output."""


_NO_MEMORY = re.compile(
    r"bad[_ ]alloc|out of memory|cannot allocate memory|failed to allocate memory|"
    r"failed to map segment|not enough memory|paging file is too small",
    re.IGNORECASE,
)
_NO_THREADS = re.compile(
    r"can't start new thread|pthread_create failed|unable to start (a )?thread|"
    r"resource unavailable, try again|_beginthreadex",
    re.IGNORECASE,
)
"""How Python and native libraries put it; none of them has a type for it."""


def limit_reached(error: BaseException) -> ResourceError | None:
    """The error to show where memory or threads ran out, whoever noticed it; else None."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _NO_MEMORY.search(text):
        room = available_bytes()
        left = "" if room is None else f", {size_text(room)} is free"
        wanted = f" ({text})" if isinstance(error, MemoryError) and text else ""
        return ResourceError(
            f"memory ran out{wanted}{left}: close other programs, raise the limit where "
            "`ulimit -v` or a container sets one, or use a smaller model, --precision int4 or a "
            "smaller --context-length at export"
        )
    if number == errno.EAGAIN or _NO_THREADS.search(text):
        return ResourceError(
            "this user or container may start no more threads: end other programs, raise the "
            "limit (`ulimit -u`), or use --threads 1"
        )
    return None


def describe_system_error(error: Exception) -> str | None:
    """The message for an error that a file, a disk or the system is to blame for; else None.

    An `OSError` that names no file may be a bug, and so may text that cannot be encoded.
    """
    if (limit := limit_reached(error)) is not None:
        return str(limit)
    if isinstance(error, UnicodeEncodeError):
        return _describe_name(error)
    if isinstance(error, RuntimeError):
        return _describe_loop(error)
    if not isinstance(error, OSError):
        return None
    reason = error.strerror or str(error)
    if error.errno in _NO_HANDLES:
        return f"too many files are open ({reason}): raise the limit with `ulimit -n 4096`"
    if error.filename is None:
        if not is_about_output(error):
            return None
        return f"the output cannot be written ({reason}): send it elsewhere, or free some space"
    names = [error.filename] if error.filename2 is None else [error.filename, error.filename2]
    shown = " and ".join(_text(name) for name in names)
    if error.errno in _NO_SPACE:
        remedy = "free some space, or name another place"
    elif error.errno in _DISK:
        remedy = "check the disk or the network drive that it is on"
    else:
        remedy = _REMEDIES.get(error.errno or 0, "name another file")
    return f"{shown} cannot be used ({reason}): {remedy}"


def is_about_output(error: BaseException) -> bool:
    """Whether stdout takes no more output."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT


def _describe_name(error: UnicodeEncodeError) -> str | None:
    """A name with bytes that are no text, or with half a character, where a name must be text."""
    refused = error.object[error.start : error.end]
    if not all("\ud800" <= c <= "\udfff" for c in refused):
        return None
    return f"{error.object} has bytes that are not UTF-8 text: use a name without them"


def _describe_loop(error: RuntimeError) -> str | None:
    """`Path.resolve` met links that lead in a circle; from Python 3.13 on it is an `OSError`."""
    message = str(error)
    if not message.startswith("Symlink loop from "):
        return None
    return f"{message.removeprefix('Symlink loop from ')}: {_REMEDIES[errno.ELOOP]}"


def _text(name: object) -> str:
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name)
