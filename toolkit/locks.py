"""One process at a time: a lock that the operating system frees when its holder dies."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path` for the block, which may end in another thread.

    Args:
        path: Made if missing, and removed afterwards.
        busy: Called once if another process holds it; waits afterwards unless this raises.

    Raises:
        OSError: the lock file cannot be made.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not path.exists():
            # It may be free since; or it cannot be made, which filelock too takes for held.
            path.touch()
        busy()
        lock.acquire()
    try:
        yield
    finally:
        # A process that waits on the removed file is given a new one (filelock sees to it);
        # Windows does not remove a file that is open, there it stays.
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
        lock.release()
