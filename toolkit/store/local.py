"""The local store: models that `pull` brought, found again by name without a network."""

import contextlib
import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..drafters import packaged_drafter
from ..errors import DamagedModelError, StoreError
from .builtin_models import BUILTIN_MODELS, BuiltinModel, find_builtin
from .contents import (
    Progress,
    StoredFile,
    check_files,
    missing_part,
    read_record,
    record_folder,
    silent,
    write_record,
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_HUB_ID = 96
"""Most characters of a hub id, as the hub itself has it."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model in the store."""

    name: str
    """Built-in name or hub id."""
    path: Path
    """A GGUF file or a Hugging Face folder."""

    @property
    def size_bytes(self) -> int:
        """Size of all its files."""
        if self.path.is_file():
            return self.path.stat().st_size
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def store_folder() -> Path:
    """`OMNIDRAFT_HOME`, or else a folder in the platform's place for caches; it may not exist."""
    home = os.environ.get("OMNIDRAFT_HOME")
    if home:
        return Path(home).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "omnidraft-npu"


def models_folder() -> Path:
    """Where the store keeps models; it may not exist."""
    return store_folder() / "models"


def resolve_model(name_or_path: str) -> Path:
    """The GGUF file or Hugging Face folder that a name or path stands for.

    A path that exists always wins; then a built-in name, then a hub id, if pulled; then the
    drafter that ships with the package.

    Raises:
        DamagedModelError: the model in the store is not what was fetched.
        StoreError: there is no such path and no such model in the store.
    """
    path = Path(name_or_path).expanduser()
    # Not `path.exists()`, which raises where a name is too long for a path.
    if name_or_path and os.path.exists(path):  # noqa: PTH110
        return path
    found = stored_path(name_or_path) or packaged_drafter(name_or_path)
    if found is not None:
        return found
    if find_builtin(name_or_path) is not None or is_hub_id(name_or_path):
        raise StoreError(
            f"{name_or_path} is neither a path nor in the local store ({models_folder()}): "
            f"get it with omnidraft-npu pull {name_or_path}"
        )
    raise unknown_model(name_or_path)


def stored_path(name: str, *, reads_all: bool = False, progress: Progress = silent) -> Path | None:
    """Path of a pulled model by built-in name, alias or hub id; None where it was not pulled.

    Its content is what was fetched: files that changed since they were last read are read again.

    Args:
        name: Built-in name, alias or hub id.
        reads_all: Read all of it, changed or not.
        progress: Receives the bytes that were read.

    Raises:
        DamagedModelError: it is in the store, but not what was fetched.
    """
    model = find_builtin(name)
    if model is None and not is_hub_id(name):
        return None
    path = hub_path(name) if model is None else builtin_path(model)
    if not os.path.lexists(path):
        return None
    record = record_path(name if model is None else model)
    recorded = read_record(record)
    try:
        if model is not None:
            known = recorded.get(model.file)
            expected = StoredFile(size=model.size, sha256=model.sha256)
            if known is not None and (known.size, known.sha256) == (model.size, model.sha256):
                expected = known
            seen = check_files(
                path.parent, {model.file: expected}, reads_all=reads_all, progress=progress
            )
        elif not path.is_dir():
            raise DamagedModelError(f"{path} is not a folder")
        elif recorded:
            seen = check_files(path, recorded, reads_all=reads_all, progress=progress)
        elif reads_all:
            # Fetched by a version that kept no record: no hash is known but today's.
            seen = record_folder(path)
        elif (missing := missing_part(path)) is not None:
            raise DamagedModelError(f"{path} lacks {missing}")
        else:
            return path
    except DamagedModelError as error:
        raise DamagedModelError(
            f"{name} in the local store is damaged ({error}): get it again with "
            f"omnidraft-npu pull {name}"
        ) from error
    if seen != recorded:
        # Without a record the content is read once more next time.
        with contextlib.suppress(OSError):
            write_record(record, seen)
    return path


def stored_models() -> list[StoredModel]:
    """Everything that was pulled and is whole, built-in models first."""
    models = []
    for name in _stored_names():
        with contextlib.suppress(DamagedModelError):
            path = stored_path(name)
            if path is not None:
                models.append(StoredModel(name=name, path=path))
    return models


def damaged_models() -> dict[str, str]:
    """What is wrong with each model in the store that is not what was fetched, by name."""
    faults = {}
    for name in _stored_names():
        try:
            stored_path(name)
        except DamagedModelError as error:
            faults[name] = str(error)
    return faults


def _stored_names() -> list[str]:
    hub = _hub_folder()
    folders = sorted(hub.iterdir()) if hub.is_dir() else []
    ids = [folder.name.replace("--", "/", 1) for folder in folders]
    return [*BUILTIN_MODELS, *(name for name in ids if is_hub_id(name))]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a model hub's, `organisation/model`."""
    return len(name) <= _MAX_HUB_ID and _HUB_ID.fullmatch(name) is not None


def builtin_path(model: BuiltinModel) -> Path:
    """Where the store keeps a built-in model."""
    return models_folder() / "builtin" / model.name / model.file


def hub_path(hub_id: str) -> Path:
    """Where the store keeps a hub's model."""
    return _hub_folder() / hub_id.replace("/", "--", 1)


def record_path(model: BuiltinModel | str) -> Path:
    """Where the store records what the files of a model hold; a hub's model by its id."""
    records = store_folder() / "records"
    if isinstance(model, BuiltinModel):
        return records / "builtin" / f"{model.name}.json"
    return records / "hub" / f"{hub_path(model).name}.json"


def unknown_model(name: str) -> StoreError:
    """The error for a name that stands for nothing, with the names that are nearly it."""
    if not name:
        return StoreError("the model's name is empty: give a path, a name or a hub id")
    if name.endswith((".gguf", "/", "\\")) or name.startswith((".", "/", "~")):
        return StoreError(f"{name} does not exist: check the path")
    known = _stored_names()
    aliases = {alias: model.name for model in BUILTIN_MODELS.values() for alias in model.aliases}
    near = difflib.get_close_matches(name.lower(), [*known, *aliases], n=3, cutoff=0.5)
    names = list(dict.fromkeys(aliases.get(match, match) for match in near))
    hint = f"did you mean {' or '.join(names)}?" if names else f"known are {', '.join(known)}."
    return StoreError(
        f"no model is called {name!r}: {hint} A path or a hub id (organisation/model) works too"
    )


def _hub_folder() -> Path:
    return models_folder() / "hub"
