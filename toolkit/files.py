"""Atomic writes and content hashes: a crash at any moment leaves the previous version."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, document: Any) -> None:
    """Write `document` as indented UTF-8 JSON, atomically."""
    with atomic_path(path) as temporary:
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
