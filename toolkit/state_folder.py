"""`state/` of a bundle: where what was learned for a target lies, and who may write there.

All of it is for its user alone, since prompts and answers can be recovered from it. It holds
folders and regular files only: a link could lead out of the bundle, and a pipe never ends.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .errors import BundleError, BusyError, StateError
from .files import PRIVATE_FILE, PRIVATE_FOLDER, make_private
from .locks import exclusive

STATE = "state"

_FOLDERS = ("adapters", "replay", "ngrams")
_JUNCTION = 0xA0000003
"""Reparse tag of a Windows junction, a link that is not called one."""

_LEARNED = re.compile(
    r"current\.json|v\d{4,}\.(json|onnx_adapter)|training\.safetensors|learner\.json"
    r"|\d{8}(-[0-9a-f]{16})?\.safetensors"
)
"""Files of adapters, and of examples to learn from."""
_NGRAMS = re.compile(r"(.+?)(\.[0-9a-z]{8}-[0-9a-z]{8})?(\.unreadable-\d+)?\.safetensors")
_LEFTOVER = re.compile(r"\.(.+)\.\w+\.tmp")
"""What a killed writer leaves of the file that is named in it."""

_PATIENCE_S = 1.0
"""Adding an answer or a version takes milliseconds, so the lock on `state/` is free soon."""
_REPLACING_S = 10.0
"""Longest time that a bundle's folder may be missing while an export replaces it."""


def adapters_path(bundle: Path, target_name: str) -> Path:
    """Where the adapter versions of a target lie."""
    return _state(bundle, target_name) / "adapters" / target_name


def replay_path(bundle: Path, target_name: str) -> Path:
    """Where the training examples of a target lie."""
    return _state(bundle, target_name) / "replay" / target_name


def ngrams_path(bundle: Path, target_name: str) -> Path:
    """The file with the segmentations that draft mode `cache` learned for a target."""
    return _state(bundle, target_name) / "ngrams" / f"{target_name}.safetensors"


def _state(bundle: Path, target_name: str) -> Path:
    if Path(target_name).name != target_name or target_name == "..":
        raise BundleError(f"the target's name {target_name!r} is a path: export the bundle again")
    return bundle / STATE


def real_path(path: Path) -> Path:
    """A path without links; one whose links lead in a circle stays as it is."""
    return Path(os.path.realpath(path))


def replaced_path(bundle: Path) -> Path:
    """Where the bundle that an export replaces lies until the new one is in its place."""
    bundle = real_path(bundle)
    return bundle.parent / f"{bundle.name}.replaced"


def export_lock(bundle: Path) -> Path:
    """The lock file that is held by whoever makes, replaces or restores `bundle`."""
    bundle = real_path(bundle)
    return bundle.parent / f".{bundle.name}.lock"


def check_state(bundle: Path, target_names: Iterable[str] = ()) -> None:
    """Refuse a `state/` that leads elsewhere, cannot be read, or is in its own way.

    Args:
        bundle: The bundle's folder.
        target_names: Targets whose folders are about to be used.

    Raises:
        StateError: names what is there, and what to do.
    """
    check_links(bundle)
    for path in state_folders(bundle, target_names):
        if path.is_file():
            raise StateError(
                f"cannot write to {path}, a file where a folder belongs: move it away, or erase "
                f"it with `omnidraft-npu adapters forget {bundle}`"
            )


def check_links(bundle: Path) -> None:
    """Refuse anything in `state/` that is neither a folder nor a regular file.

    Raises:
        StateError: names it; or what is there cannot be read.
    """
    try:
        _check_links(bundle / STATE)
    except OSError as error:
        raise StateError(
            f"{error.filename} cannot be read ({error.strerror}): change who may read it "
            "(decoding with --no-learn does not look at it)"
        ) from error


def _check_links(state: Path) -> None:
    pending = [state]
    while pending:
        path = pending.pop()
        # A file may be gone by then: another process removes what it has learned from.
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            tag = getattr(found, "st_reparse_tag", 0)
            is_link = stat.S_ISLNK(found.st_mode) or tag == _JUNCTION
            if is_link or not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
                what = "a link" if is_link else "neither a folder nor a regular file"
                raise StateError(
                    f"{path} is {what}: nothing under {STATE} is read, written or erased until it "
                    "is removed"
                )
            if stat.S_ISDIR(found.st_mode):
                with os.scandir(path) as entries:
                    pending += [
                        Path(entry.path)
                        for entry in entries
                        if os.name == "nt" or not entry.is_file(follow_symlinks=False)
                    ]


def state_folders(bundle: Path, target_names: Iterable[str]) -> list[Path]:
    """Every folder that what was learned for these targets may lie in, the outer ones first."""
    names = list(target_names)
    inner = [path(bundle, name) for name in names for path in (adapters_path, replay_path)]
    return [bundle / STATE, *(bundle / STATE / name for name in _FOLDERS), *inner]


@contextlib.contextmanager
def learning(bundle: Path, target_name: str) -> Iterator[None]:
    """Be the only one that changes adapters and examples of a target, for the block.

    Hold it for single changes, not while an adapter is being trained: `only_learner` is for
    that. Reading needs no lock. A process that dies frees it; what it left half-written is
    removed by the next.

    Args:
        bundle: The bundle's folder.
        target_name: Another target can be learned for at the same time.

    Raises:
        StateError: another process holds the lock, or `state/` cannot be written or used.
        BundleError: the target's name is a path.
    """
    with _locked_for(bundle, target_name, "learning", None, patience_s=_PATIENCE_S):
        yield


@contextlib.contextmanager
def only_learner(
    bundle: Path, target_name: str, busy: Callable[[], None] | None = None
) -> Iterator[None]:
    """Be the only process that trains an adapter for a target, for the block.

    Others keep answers and change adapters meanwhile; a learner holds `learning` too when it
    saves something.

    Args:
        bundle: The bundle's folder.
        target_name: Another target can be learned for at the same time.
        busy: Called if another process is learning; waits afterwards unless this raises. None
            raises a StateError.

    Raises:
        StateError: another process is learning, or `state/` cannot be written or used.
        BundleError: the target's name is a path.
    """
    with _locked_for(bundle, target_name, "learner", busy):
        yield


@contextlib.contextmanager
def _locked_for(
    bundle: Path,
    target_name: str,
    lock_name: str,
    busy: Callable[[], None] | None,
    *,
    patience_s: float = 0.0,
) -> Iterator[None]:
    lock = _state(bundle, target_name) / f"{target_name}.{lock_name}.lock"

    def refuse() -> None:
        raise BusyError(
            f"another process is learning for {target_name} of {bundle}: wait until it ends "
            "(decoding with --no-learn need not wait)"
        )

    check_state(bundle, [target_name])
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_locked(bundle, lock, busy or refuse, patience_s=patience_s))
            if lock_name == "learning":
                _tidy(bundle, target_name)
        except OSError as error:
            raise StateError(
                f"cannot write to {lock.parent} ({error.strerror or error}): make it writable "
                "(decoding with --no-learn writes nothing)"
            ) from error
        yield


@contextlib.contextmanager
def saving_ngrams(path: Path) -> Iterator[None]:
    """Be the only one that changes the segmentations of a target, for the block; waits for others.

    Args:
        path: `ngrams_path` of the target.

    Raises:
        OSError: the folder cannot be written.
    """
    bundle = path.parents[2]
    with _locked(bundle, path.with_suffix(".lock"), lambda: None):
        _tidy_files(_entries(path.parent, lambda name: _ngrams_owner(name) == path.stem))
        yield


@contextlib.contextmanager
def changing_all(bundle: Path, target_names: Iterable[str]) -> Iterator[None]:
    """Be the only one that changes anything that was learned for these targets, for the block.

    Raises:
        StateError: another process is learning for one of them, or `state/` cannot be used.
        OSError: it cannot be written.
    """
    names = sorted(set(target_names))
    with contextlib.ExitStack() as held:
        held.callback(_remove_empty_folders, bundle, names)
        for name in names:
            held.enter_context(learning(bundle, name))
            held.enter_context(saving_ngrams(ngrams_path(bundle, name)))
        yield


def _remove_empty_folders(bundle: Path, target_names: Iterable[str]) -> None:
    for folder in reversed(state_folders(bundle, target_names)):
        # What else lies there stays, and so does its folder.
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _locked(
    bundle: Path, lock: Path, busy: Callable[[], None], *, patience_s: float = 0.0
) -> Iterator[None]:
    """Hold a lock file in `state/`, and make the folders to it, for this user alone."""
    deadline = time.monotonic() + _REPLACING_S
    with contextlib.ExitStack() as held:
        while True:
            try:
                _make_folder(bundle, lock.parent)
                held.enter_context(exclusive(lock, busy, private=True, patience_s=patience_s))
                break
            except FileNotFoundError:
                # An export is about to put another bundle here, with this state in it.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield


def _make_folder(bundle: Path, folder: Path) -> None:
    """Make a folder of `state/`, but never the bundle's: an export may be replacing it."""
    path = bundle
    for part in folder.relative_to(bundle).parts:
        path = path / part
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        make_private(path, PRIVATE_FOLDER)


def _tidy(bundle: Path, target_name: str) -> None:
    """Remove what killed writers left, and let nobody else read what earlier versions wrote."""
    for folder in (adapters_path(bundle, target_name), replay_path(bundle, target_name)):
        if folder.is_dir():
            make_private(folder.parent, PRIVATE_FOLDER)
            make_private(folder, PRIVATE_FOLDER)
            _tidy_files(_entries(folder, _is_learned))


def _tidy_files(entries: Iterable[os.DirEntry[str]]) -> None:
    for entry in entries:
        # A reader may remove what it cannot use.
        with contextlib.suppress(FileNotFoundError):
            if entry.name.startswith("."):
                Path(entry.path).unlink()
            elif entry.stat(follow_symlinks=False).st_mode & 0o077:
                make_private(Path(entry.path), PRIVATE_FILE)


def learned_files(bundle: Path, target_name: str) -> list[Path]:
    """Adapters and training examples of a target, and what killed writers left of such."""
    folders = (adapters_path(bundle, target_name), replay_path(bundle, target_name))
    return [path for folder in folders for path in learned_in(folder)]


def learned_in(folder: Path) -> list[Path]:
    """The same in one folder."""
    return _files(folder, _is_learned)


def ngram_files(bundle: Path, target_name: str) -> list[Path]:
    """The segmentations of a target, also for other tokenizers or damaged, leftovers included."""
    folder = ngrams_path(bundle, target_name).parent
    return _files(folder, lambda name: _ngrams_owner(name) == target_name)


def learned_targets(bundle: Path) -> set[str]:
    """Names of the targets that something may have been learned for, also of earlier exports."""
    names: set[str] = set()
    for folder in (bundle / STATE / "adapters", bundle / STATE / "replay"):
        if folder.is_dir():
            names |= {path.name for path in folder.iterdir()}
    for path in _files(bundle / STATE / "ngrams", lambda name: _ngrams_owner(name) is not None):
        names.add(_NGRAMS.sub(r"\1", _written_name(path.name)))
    return names


def _files(folder: Path, is_ours: Callable[[str], bool]) -> list[Path]:
    return sorted(Path(entry.path) for entry in _entries(folder, is_ours))


def _entries(folder: Path, is_ours: Callable[[str], bool]) -> list[os.DirEntry[str]]:
    """Regular files of ours in a folder, and what killed writers left of such."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [
            entry
            for entry in entries
            if entry.is_file(follow_symlinks=False) and is_ours(_written_name(entry.name))
        ]


def _is_learned(name: str) -> bool:
    return _LEARNED.fullmatch(name) is not None


def _written_name(name: str) -> str:
    """The name of a file, or of that which a writer was to replace by it."""
    left = _LEFTOVER.fullmatch(name)
    return left[1] if left else name


def _ngrams_owner(name: str) -> str | None:
    """The target whose segmentations a file in `ngrams/` holds; None for another file."""
    found = _NGRAMS.fullmatch(name)
    return found[1] if found else None
