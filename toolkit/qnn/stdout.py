"""Keep what native code prints off stdout, which belongs to the user's text."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def stdout_fd_to_stderr() -> Iterator[None]:
    """While it lasts, file descriptor 1 leads where descriptor 2 does.

    The HTP simulator prints a line at a process's first session, with no way to stop it.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # stdout is closed: nothing can get there
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
