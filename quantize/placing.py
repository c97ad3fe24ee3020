"""Put a finished folder in an output's place: the old one stays until the new one is there."""

import os
import shutil
from pathlib import Path

from omnidraft_npu.bundle import MANIFEST
from omnidraft_npu.errors import ExportError

STATE = "state"


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that cannot or must not be replaced; mend what a crash left of one.

    Raises:
        ExportError: it is a mount point, the current folder, something else than a bundle, or
            a bundle that `force` does not give up.
    """
    _recover(output)
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


def put_in_place(finished: Path, output: Path) -> None:
    """Rename `finished` to `output`; what an old bundle there had learned is carried over.

    Raises:
        OSError: a rename failed; the old bundle is back in its place.
    """
    replaced = _replaced(output)
    if output.exists():
        output.replace(replaced)
    try:
        finished.replace(output)
    except OSError:
        if replaced.exists():
            replaced.replace(output)
        raise
    _recover(output)


def _recover(output: Path) -> None:
    """Finish a replacement, or undo it where the new bundle never came."""
    replaced = _replaced(output)
    if not replaced.is_dir():
        return
    if not output.exists():
        replaced.replace(output)
        return
    if (replaced / STATE).is_dir() and not (output / STATE).exists():
        (replaced / STATE).replace(output / STATE)
    shutil.rmtree(replaced)


def _replaced(output: Path) -> Path:
    return output.parent / f"{output.name}.replaced"
