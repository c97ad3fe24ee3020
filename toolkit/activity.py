"""Which commands of ours are at work on this machine, so that learning can give way to them.

A command holds a lock file of its own in the store while it works. The system frees the lock
when the command dies, so nothing that was killed is waited for.
"""

import contextlib
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

from .errors import BusyError
from .locks import exclusive
from .store.local import store_folder

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Announce, for the block, that a command of ours is at work."""
    path = _folder() / f"{secrets.token_hex(8)}.lock"
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another process may look at it just now: that takes no time.
            held.enter_context(exclusive(path, lambda: None))
        except OSError as error:
            logger.debug("learning in the background will not give way: %s", error)
        try:
            yield
        finally:
            held.close()
            _remove(path)


def is_anyone_at_work() -> bool:
    """Whether any process is within `at_work`; traces of those that died are removed."""
    for path in _folder().glob("*.lock"):
        try:
            with exclusive(path, _refuse):
                pass
        except BusyError:
            return True
        except OSError as error:
            logger.debug("%s cannot be looked at: %s", path, error)
        _remove(path)
    return False


def _folder() -> Path:
    return store_folder() / "active"


def _remove(path: Path) -> None:
    """Remove a lock file that is free: Windows could not while it was held."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _refuse() -> None:
    raise BusyError("a command is at work")
