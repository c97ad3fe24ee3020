"""Put a finished bundle in an output's place, and refuse what cannot or must not be replaced."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from omnidraft_npu.errors import BusyError, ExportError, OmniDraftError
from omnidraft_npu.manifest import MANIFEST
from omnidraft_npu.replacement import move, recover, remove_replaced, target_names, undo
from omnidraft_npu.state_folder import STATE, changing_all, check_links, replaced_path

logger = logging.getLogger(__name__)

_OTHERS_S = 30.0
"""Longest wait for processes that learn, before a replacement is refused."""
_POLL_S = 0.02


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that cannot or must not be replaced; mend what a crash left of one.

    Raises:
        ExportError: it is a mount point, the current folder, something else than a bundle, or
            a bundle that `force` does not give up.
    """
    if problem := recover(output):
        raise ExportError(problem)
    if not output.exists():
        return
    if os.path.ismount(output):
        raise ExportError(f"{output} is a mount point: choose a folder inside it")
    if output == Path.cwd():
        raise ExportError(f"{output} is the folder that you are in: choose one inside it")
    if not output.is_dir() or (any(output.iterdir()) and not (output / MANIFEST).is_file()):
        raise ExportError(f"{output} exists and is not a bundle: choose another --output")
    if not force and any(output.iterdir()):
        raise ExportError(f"{output} exists: use --force to replace it, or another --output")
    if os.path.lexists(replaced_path(output)):
        raise ExportError(f"{replaced_path(output)} is in the way: move it elsewhere")
    check_links(output)


def put_in_place(finished: Path, output: Path) -> None:
    """Rename `finished` to `output`; what an old bundle there had learned is carried over.

    The steps are those of `omnidraft_npu.replacement`.

    Args:
        finished: The new bundle, `partial_path` of `output`.
        output: May be missing, an empty folder or a bundle; its `export_lock` is held.

    Raises:
        ExportError: other processes go on learning, or `state/` cannot be used.
        OSError: a rename failed; the old bundle is back in its place.
    """
    if output.is_dir() and not any(output.iterdir()):
        output.rmdir()
    if not output.exists():
        move(finished, output)
        return
    with _state_held(output) as held:
        if os.name == "nt":
            # Windows renames no folder with an open file in it; who opens one now makes the
            # rename fail, and nothing is lost.
            held.close()
        move(output, replaced_path(output))
        try:
            if (replaced_path(output) / STATE).exists():
                move(replaced_path(output) / STATE, finished / STATE)
            move(finished, output)
        except OSError:
            undo(output, finished)
            raise
    remove_replaced(output)


@contextlib.contextmanager
def _state_held(output: Path) -> Iterator[contextlib.ExitStack]:
    """Let no other process change what `output` has learned, for the block.

    Raises:
        ExportError: others go on learning, or `state/` cannot be used.
    """
    deadline, is_told = time.monotonic() + _OTHERS_S, False
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(changing_all(output, target_names(output)))
                break
            except BusyError as error:
                if time.monotonic() > deadline:
                    raise ExportError(str(error)) from error
                if not is_told:
                    logger.warning("%s: waiting for it", str(error).partition(":")[0])
                is_told = True
                time.sleep(_POLL_S)
            except OmniDraftError as error:
                raise ExportError(str(error)) from error
        yield held
