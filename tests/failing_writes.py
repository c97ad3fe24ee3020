"""Makes one call that changes files fail, as a full or read-only disk does."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

PLACES = (
    (os, "open"),
    (os, "mkdir"),
    (os, "fsync"),
    (os, "replace"),
    (os, "chmod"),
    (Path, "write_bytes"),
    (Path, "write_text"),
    (ort.AdapterFormat, "export_adapter"),
)


class FailingWrites:
    """Counts the calls at `PLACES`, and lets one fail; one that writes leaves half a file."""

    def __init__(self, number: int, errno: int) -> None:
        self.number = number
        self.errno = errno
        self.count = 0
        self.failed: str | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """For the block."""
        with pytest.MonkeyPatch.context() as patch:
            for place, name in PLACES:
                patch.setattr(place, name, self._wrapped(getattr(place, name), name))
            yield

    def _wrapped(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count != self.number:
                # Nobody pulls the plug here: to wait for the disk would only take long.
                return None if name == "fsync" else call(*arguments, **options)
            self.failed = name
            if name == "export_adapter":
                call(*arguments, **options)
                self._halve(Path(arguments[1]))
                raise RuntimeError(f"Failed to write 1234 bytes to {arguments[1]}")
            if name in ("write_bytes", "write_text"):
                call(*arguments, **options)
                self._halve(arguments[0])
            raise OSError(self.errno, os.strerror(self.errno))

        return wrapper

    @staticmethod
    def _halve(path: Path) -> None:
        os.truncate(path, path.stat().st_size // 2)
