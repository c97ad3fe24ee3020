"""Whether a stored model is still what was fetched: sizes, times and SHA-256 of its files."""

import contextlib
import dataclasses
import hashlib
import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from ..documents import Count, read_document
from ..errors import DamagedModelError, StoreError
from ..files import write_json

_BLOCK_BYTES = 1 << 20
_INDEX = "model.safetensors.index.json"
_SHARDS = "*-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"


class Progress(Protocol):
    """Receives how many bytes are done."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show it."""
        ...


def silent(done_bytes: int, total_bytes: int) -> None:
    """Show nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """What a file of a model holds, and when that was last seen."""

    size: Count
    sha256: str
    mtime_ns: int = -1
    ctime_ns: int = -1
    """With the size and `mtime_ns`: unchanged since its content was last read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
    files: dict[str, StoredFile]
    schema_version: int = 1


def read_record(path: Path) -> dict[str, StoredFile]:
    """The files that were recorded at `path`; empty where there is no record that can be read."""
    with contextlib.suppress(StoreError, OSError):
        return read_document(path, _Record, error=StoreError, advice="pull the model again").files
    return {}


def write_record(path: Path, files: Mapping[str, StoredFile]) -> None:
    """Record what was seen, atomically.

    Raises:
        OSError: the store cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(_Record(files=dict(files))))


def check_files(
    folder: Path,
    expected: Mapping[str, StoredFile],
    *,
    reads_all: bool = False,
    progress: Progress = silent,
) -> dict[str, StoredFile]:
    """The files of a model as they are now, which is as `expected`.

    Args:
        folder: Holds them.
        expected: What each holds; where its times are those of the file, that was read before.
        reads_all: Read the content of all files, not only of those that changed.
        progress: Receives the bytes that were read.

    Raises:
        DamagedModelError: a file is missing, is no regular file, or holds something else.
    """
    total, done, seen = sum(file.size for file in expected.values()), 0, {}
    for name, file in expected.items():
        path = folder / name
        now = _status(path, file.sha256)
        if now.size != file.size:
            raise DamagedModelError(f"{path} has {now.size} bytes, not {file.size}")
        if reads_all or now != file:
            sha256 = hashlib.sha256()
            with _read_errors(path), path.open("rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    sha256.update(block)
                    done += len(block)
                    progress(min(done, total), total)
            if sha256.hexdigest() != file.sha256:
                raise DamagedModelError(
                    f"{path} has sha256 {sha256.hexdigest()}, not {file.sha256}"
                )
        seen[name] = now
    return seen


def record_folder(folder: Path) -> dict[str, StoredFile]:
    """What the files of a checkpoint's folder hold now.

    Raises:
        DamagedModelError: `missing_part` of it, or a file cannot be read.
    """
    missing = missing_part(folder)
    if missing is not None:
        raise DamagedModelError(f"{folder} lacks {missing}")
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            with _read_errors(path), path.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            files[path.name] = _status(path, sha256)
    return files


def missing_part(folder: Path) -> str | None:
    """What a checkpoint's folder lacks, as far as its own files show; None if it is whole."""
    if not (folder / "config.json").is_file():
        return "config.json"
    index = folder / _INDEX
    if index.is_file():
        for name in _shards(index):
            if not (folder / name).is_file():
                return name
    elif not any(path.is_file() for path in folder.glob("*.safetensors")):
        return "weights (*.safetensors)"
    elif any(folder.glob(_SHARDS)) and not (folder / "model.safetensors").is_file():
        return _INDEX
    return None


def check_hub_hash(path: Path, etag: str) -> None:
    """Compare a file with the hash that the model hub gave with it.

    A hub's etag is the SHA-256 of a large file, and git's blob hash of a small one.

    Raises:
        DamagedModelError: it is another file. Other forms of an etag are no hash, and pass.
    """
    with _read_errors(path), path.open("rb") as stream:
        if len(etag) == 64:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        elif len(etag) == 40:
            content = stream.read()
            blob = b"blob %d\0" % len(content) + content
            found = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
        else:
            return
    if found != etag:
        raise DamagedModelError(f"{path.name} has hash {found}, not {etag}")


def _shards(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedModelError(f"{index} is no index of shards") from None


def _status(path: Path, sha256: str) -> StoredFile:
    with _read_errors(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedModelError(f"{path} is not a file")
    return StoredFile(
        size=found.st_size,
        sha256=sha256,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
    )


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedModelError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedModelError(f"{path} cannot be read ({error.strerror or error})") from error
