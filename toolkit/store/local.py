"""The local store: models that `pull` brought, found again by name without a network."""

import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..drafters import packaged_drafter
from ..errors import StoreError
from .builtin_models import BUILTIN_MODELS, BuiltinModel, find_builtin

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


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
        StoreError: there is no such path and no such model in the store.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
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


def stored_path(name: str) -> Path | None:
    """Path of a pulled model by built-in name, alias or hub id; None where it was not pulled."""
    model = find_builtin(name)
    if model is not None:
        file = builtin_path(model)
        return file if file.is_file() and file.stat().st_size == model.size else None
    if is_hub_id(name) and hub_path(name).is_dir():
        return hub_path(name)
    return None


def stored_models() -> list[StoredModel]:
    """Everything that was pulled, built-in models first."""
    names = [name for name in BUILTIN_MODELS if stored_path(name) is not None]
    hub = _hub_folder()
    folders = sorted(hub.iterdir()) if hub.is_dir() else []
    names += [folder.name.replace("--", "/", 1) for folder in folders]
    paths = {name: stored_path(name) for name in names}
    return [StoredModel(name=name, path=path) for name, path in paths.items() if path is not None]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a model hub's, `organisation/model`."""
    return _HUB_ID.fullmatch(name) is not None


def builtin_path(model: BuiltinModel) -> Path:
    """Where the store keeps a built-in model."""
    return models_folder() / "builtin" / model.name / model.file


def hub_path(hub_id: str) -> Path:
    """Where the store keeps a hub's model."""
    return _hub_folder() / hub_id.replace("/", "--", 1)


def unknown_model(name: str) -> StoreError:
    """The error for a name that stands for nothing, with the names that are nearly it."""
    if not name:
        return StoreError("the model's name is empty: give a path, a name or a hub id")
    if name.endswith((".gguf", "/", "\\")) or name.startswith((".", "/", "~")):
        return StoreError(f"{name} does not exist: check the path")
    known = [*BUILTIN_MODELS, *(m.name for m in stored_models() if m.name not in BUILTIN_MODELS)]
    aliases = {alias: model.name for model in BUILTIN_MODELS.values() for alias in model.aliases}
    near = difflib.get_close_matches(name.lower(), [*known, *aliases], n=3, cutoff=0.5)
    names = list(dict.fromkeys(aliases.get(match, match) for match in near))
    hint = f"did you mean {' or '.join(names)}?" if names else f"known are {', '.join(known)}."
    return StoreError(
        f"no model is called {name!r}: {hint} A path or a hub id (organisation/model) works too"
    )


def _hub_folder() -> Path:
    return models_folder() / "hub"
