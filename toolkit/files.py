"""Atomic writes and content hashes: a crash at any moment leaves the previous version."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_WINDOWS_TRIES, _WINDOWS_WAIT_S = 50, 0.01
"""Windows refuses to replace a file while another process reads it."""


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary sibling to write to; it takes `path`'s place when the block ends well.

    The file is flushed to disk before the rename. It is removed if the block raises.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _replace(temporary: Path, path: Path) -> None:
    for _ in range(_WINDOWS_TRIES if os.name == "nt" else 0):
        with contextlib.suppress(PermissionError):
            temporary.replace(path)
            return
        time.sleep(_WINDOWS_WAIT_S)
    temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    """Let the rename survive a power failure too, where the system has a call for that."""
    if os.name == "nt":
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path, *, of: str = "") -> None:
    """Remove what killed writers left of `atomic_path`; no other may be writing there now.

    Args:
        folder: Which need not exist.
        of: Name of the file that they wrote; empty for any.
    """
    prefix = f".{of}." if of else "."
    for path in folder.glob(".*.tmp"):
        if path.name.startswith(prefix):
            path.unlink(missing_ok=True)


def bytes_of(path: Path) -> int:
    """A file's size; 0 for one that another process removed meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_json(path: Path, document: Any) -> None:
    """Write `document` as indented UTF-8 JSON, atomically."""
    with atomic_path(path) as temporary:
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[str, Any], metadata: dict[str, str]) -> None:
    """Write arrays as one safetensors file, atomically.

    Raises:
        OSError: it cannot be written; `safetensors.numpy.save_file` would raise another error.
    """
    from safetensors.numpy import save

    data = save(dict(tensors), metadata)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
