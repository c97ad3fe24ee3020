"""One process at a time: a lock that the operating system frees when its holder dies."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import PRIVATE_FILE


@contextlib.contextmanager
def exclusive(
    path: Path, busy: Callable[[], None], *, private: bool = False, patience_s: float = 0.0
) -> Iterator[None]:
    """Hold the lock file `path` for the block, which may end in another thread.

    Args:
        path: Made if missing, and removed afterwards, unless it is another file by then.
        busy: Called once if another process holds it; waits afterwards unless this raises.
        private: Make it for this user alone, whatever the umask.
        patience_s: Seconds that another process may hold it before `busy` is called.

    Raises:
        OSError: the lock file cannot be made, or is not a regular file: what a link leads to
            could be emptied. FileNotFoundError where its folder is gone, also since just now.
    """
    from filelock import FileLock, Timeout

    _identity(path)
    if private:
        lock = FileLock(path, thread_local=False, mode=PRIVATE_FILE)
    else:
        lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        if not path.exists():
            # It may be free since; or it cannot be made, which filelock too takes for held.
            path.touch(PRIVATE_FILE if private else 0o666)
        busy()
        lock.acquire()
    while (held := _identity(path)) is None:
        # The file was removed between the opening and the locking: others lock another one.
        lock.release()
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        lock.acquire()
    try:
        yield
    finally:
        # A process that waits on the removed file makes a new one;
        # Windows does not remove a file that is open, there it stays.
        with contextlib.suppress(OSError):
            if _identity(path) == held:
                path.unlink(missing_ok=True)
        lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is, whatever it is called; None where there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        # filelock opens a link's target in some versions, and empties it.
        raise OSError(
            errno.EINVAL, f"the lock {path.name} is not a regular file: remove it", os.fspath(path)
        )
    return found.st_dev, found.st_ino
