"""`state/` of a bundle: where what was learned for a target lies, and who may write there."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .errors import BundleError, StateError
from .files import bytes_of, remove_leftovers
from .locks import exclusive


def adapters_path(bundle: Path, target_name: str) -> Path:
    """Where the adapter versions of a target lie."""
    return _state(bundle, target_name) / "adapters" / target_name


def replay_path(bundle: Path, target_name: str) -> Path:
    """Where the training examples of a target lie."""
    return _state(bundle, target_name) / "replay" / target_name


@contextlib.contextmanager
def learning(bundle: Path, target_name: str) -> Iterator[None]:
    """Be the only one that changes adapters and examples of a target, for the block.

    Reading needs no lock. A process that dies frees it; what it left half-written is removed
    by the next. Nothing waits.

    Args:
        bundle: The bundle's folder.
        target_name: Another target can be learned for at the same time.

    Raises:
        StateError: another process holds the lock, or `state/` cannot be written.
        BundleError: the target's name is a path.
    """
    lock = _state(bundle, target_name) / f"{target_name}.learning.lock"

    def busy() -> None:
        raise StateError(
            f"another process is learning for {target_name} of {bundle}: wait until it ends "
            "(decoding with --no-learn need not wait)"
        )

    with contextlib.ExitStack() as held:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(lock, busy))
            for folder in (adapters_path(bundle, target_name), replay_path(bundle, target_name)):
                remove_leftovers(folder)
        except OSError as error:
            raise StateError(
                f"cannot write to {lock.parent} ({error.strerror or error}): make it writable "
                "(decoding with --no-learn writes nothing)"
            ) from error
        yield


def _state(bundle: Path, target_name: str) -> Path:
    if Path(target_name).name != target_name or target_name == "..":
        raise BundleError(f"the target's name {target_name!r} is a path: export the bundle again")
    return bundle / "state"


def bytes_learned(bundle: Path, target_name: str) -> int:
    """What adapters and examples of a target take on disk, leftovers of crashes included."""
    return sum(bytes_of(path) for path in _learned(bundle, target_name) if path.is_file())


def erase_learned(bundle: Path, target_name: str) -> None:
    """Erase all adapters and examples of a target; call it within `learning`.

    Raises:
        StateError: something cannot be erased; the rest may be gone.
    """
    try:
        for path in _learned(bundle, target_name):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(
            f"{error.filename} cannot be erased ({error.strerror}): make it writable, and "
            "forget again"
        ) from error


def _learned(bundle: Path, target_name: str) -> list[Path]:
    """Everything in the two folders, and what is deeper first."""
    folders = (replay_path(bundle, target_name), adapters_path(bundle, target_name))
    return [path for folder in folders for path in sorted(folder.rglob("*"), reverse=True)]
