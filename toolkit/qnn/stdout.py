"""Keep what native code prints off stdout, which belongs to the user's text."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

_NOISE = b" # LIBNATIVE: "
"""How the simulator's line starts, at a process's first session; there is no way to stop it."""


@contextlib.contextmanager
def stdout_fd_to_stderr() -> Iterator[None]:
    """While it lasts, what is written to file descriptor 1 is held back, then goes to stderr."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # stdout is closed: nothing can get there
        yield
        return
    with tempfile.TemporaryFile() as held:
        try:
            os.dup2(held.fileno(), 1)
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            held.seek(0)
            lines = [line for line in held if line.strip() and not line.startswith(_NOISE)]
            if lines:
                os.write(2, b"".join(lines))
