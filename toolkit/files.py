"""Atomic writes and content hashes: a crash at any moment leaves the previous version."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of what only its user may read."""

_WINDOWS_TRIES, _WINDOWS_WAIT_S = 50, 0.01
"""Windows refuses to replace a file while another process reads it."""


@contextlib.contextmanager
def atomic_path(path: Path, *, private: bool = False) -> Iterator[Path]:
    """A temporary sibling to write to; it takes `path`'s place when the block ends well.

    The file is flushed to disk before the rename. It is removed if the block raises.

    Args:
        path: The file.
        private: For this user alone, whatever the umask; else the umask decides.
    """
    temporary = _temporary(path)
    mode = PRIVATE_FILE if private else 0o666
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if private:
            # What wrote the file may have made it anew; some file systems have no permissions.
            with contextlib.suppress(PermissionError):
                temporary.chmod(PRIVATE_FILE)
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    if not folder.exists():
        private_folder(folder.parent)
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def make_private(path: Path, mode: int) -> None:
    """Take away what others may do with a file or folder of ours, where the file system can."""
    if os.name != "nt" and stat.S_IMODE(path.lstat().st_mode) != mode:
        # Some file systems have no permissions, and another user's files keep theirs.
        with contextlib.suppress(PermissionError):
            path.chmod(mode)


def _replace(temporary: Path, path: Path) -> None:
    for _ in range(_WINDOWS_TRIES if os.name == "nt" else 0):
        with contextlib.suppress(PermissionError):
            temporary.replace(path)
            return
        time.sleep(_WINDOWS_WAIT_S)
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Let the rename survive a power failure too, where the system has a call for that."""
    if os.name == "nt":
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_writable(path: Path) -> None:
    """Pass where `atomic_path` could write a file, before the work that it is to hold.

    Raises:
        OSError: it could not.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = _temporary(path)
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def bytes_of(path: Path) -> int:
    """A file's size; 0 for one that another process removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_json(path: Path, document: Any, *, private: bool = False) -> None:
    """Write `document` as indented UTF-8 JSON, atomically; `private` as for `atomic_path`."""
    with atomic_path(path, private=private) as temporary:
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8")


def write_safetensors(
    path: Path, tensors: Mapping[str, Any], metadata: dict[str, str], *, private: bool = False
) -> None:
    """Write arrays as one safetensors file, atomically; `private` as for `atomic_path`.

    Raises:
        OSError: it cannot be written; `safetensors.numpy.save_file` would raise another error.
    """
    from safetensors.numpy import save

    data = save(dict(tensors), metadata)
    with atomic_path(path, private=private) as temporary:
        temporary.write_bytes(data)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
