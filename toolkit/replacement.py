"""Replace a bundle by a new one, such that at any moment one is there with all that was learned.

`state/` is never copied. It moves with renames while no other process may write to it, so it is
in one place at any time, and what an interruption leaves shows how far it came:

====  ============================================  =====================================
step  rename                                        an interruption after it is
====  ============================================  =====================================
1     `OUT` to `OUT.replaced`                       undone: the old bundle comes back
2     `OUT.replaced/state` to `OUT.partial/state`   undone
3     `OUT.partial` to `OUT`                        finished
4     `OUT.replaced` to `.OUT.removed`, deleted     finished
====  ============================================  =====================================

Earlier versions moved the state last. What they left is joined with what was learned since.
"""

import contextlib
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .documents import read_document
from .errors import BundleError, BusyError, StateError
from .files import private_folder, sha256_of, sync_folder
from .locks import exclusive
from .manifest import MANIFEST
from .state_folder import (
    STATE,
    changing_all,
    check_links,
    export_lock,
    learned_targets,
    real_path,
    replaced_path,
)

logger = logging.getLogger(__name__)

_EXPORT_S = 10.0
"""Longest wait for an export that is just replacing the bundle which is to be opened."""
_POLL_S = 0.02


def partial_path(output: Path) -> Path:
    """Where a new bundle is made before it takes the place of `output`."""
    output = real_path(output)
    return output.parent / f"{output.name}.partial"


def restore(output: Path) -> None:
    """Finish or undo what an interrupted replacement left of a bundle, if no export is at work.

    Never fails: what cannot be mended now is reported, and left as it is.
    """
    output = real_path(output)
    deadline = time.monotonic() + _EXPORT_S
    while _has_leftovers(output) or os.path.lexists(_removed_path(output)):
        try:
            with exclusive(export_lock(output), _refuse):
                problem = recover(output)
        except BusyError as error:
            if time.monotonic() < deadline and _has_leftovers(output):
                time.sleep(_POLL_S)
                continue
            problem = f"{error}: what an earlier one left is mended later" * _has_leftovers(output)
        except (OSError, StateError) as error:
            problem = f"what an interrupted export left of {output} cannot be mended: {error}"
        if problem:
            logger.warning("%s", problem)
        return


def recover(output: Path) -> str:
    """Finish an interrupted replacement, or undo it where the new bundle never came.

    Args:
        output: The bundle; its `export_lock` is held.

    Returns:
        What stays since it was learned by two bundles, and what to do; empty if all is well.

    Raises:
        StateError: the state cannot be used, or another process is learning.
        OSError: something cannot be moved; all is still there.
    """
    replaced, partial = replaced_path(output), partial_path(output)
    if not output.exists():
        if _is_bundle(replaced):
            undo(output, partial)
            logger.warning("an interrupted export is undone: %s is as it was", output)
        return ""
    for left in (replaced, partial):
        if os.path.lexists(left / STATE) and (conflict := _give_back(left / STATE, output)):
            return (
                f"{left / STATE} holds what was learned before an interrupted export, and {output} "
                f"has learned since ({conflict} is in both): move it away (`omnidraft-npu adapters "
                "import` takes an adapter from it), or delete it"
            )
    remove_replaced(output)
    return ""


def _has_leftovers(output: Path) -> bool:
    return any(map(os.path.lexists, (replaced_path(output), partial_path(output) / STATE)))


def _removed_path(output: Path) -> Path:
    return output.parent / f".{output.name}.removed"


def _is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _refuse() -> None:
    raise BusyError("another export is at work")


def undo(output: Path, partial: Path) -> None:
    """Bring the old bundle back from where steps 1 and 2 put it, with its state."""
    replaced = replaced_path(output)
    if (partial / STATE).exists() and not (replaced / STATE).exists():
        move(partial / STATE, replaced / STATE)
    move(replaced, output)


def remove_replaced(output: Path) -> None:
    """Delete an old bundle whose state is in the new one; a folder of another kind stays."""
    replaced, removed = replaced_path(output), _removed_path(output)
    shutil.rmtree(removed, ignore_errors=True)
    if _is_bundle(replaced) and not os.path.lexists(replaced / STATE):
        move(replaced, removed)
        shutil.rmtree(removed, ignore_errors=True)


@dataclass(frozen=True)
class _Targets:
    targets: dict[str, Any]


def target_names(bundle: Path) -> set[str]:
    """Targets that a process may be learning for."""
    names = learned_targets(bundle)
    # Nobody learns with a bundle whose manifest cannot be read.
    with contextlib.suppress(BundleError):
        names |= read_document(bundle / MANIFEST, _Targets).targets.keys()
    return {name for name in names if Path(name).name == name}


def _give_back(state: Path, output: Path) -> str:
    """Join a `state/` with that of `output`; gives a file that is in both and differs, if any."""
    check_links(state.parent)
    try:
        move(state, output / STATE)
    except OSError:
        if not os.path.lexists(output / STATE):
            raise
    else:
        return ""
    with changing_all(output, target_names(output) | learned_targets(state.parent)):
        conflict = ""
        for folder in sorted([state, *(p for p in state.rglob("*") if p.is_dir())], reverse=True):
            conflict = _join(folder, output / STATE / folder.relative_to(state)) or conflict
            if not any(folder.iterdir()):
                folder.rmdir()
    return conflict


def _join(source: Path, folder: Path) -> str:
    """Move the files of a folder into another; none where one of them differs there."""
    files = [path for path in source.iterdir() if path.is_file()]
    for path in files:
        there = folder / path.name
        if there.exists() and sha256_of(path) != sha256_of(there):
            return str(there)
    for path in files:
        if (folder / path.name).exists():
            path.unlink()
        else:
            private_folder(folder)
            path.replace(folder / path.name)
    return ""


def move(source: Path, target: Path) -> None:
    """Rename, in a way that survives a power failure."""
    source.replace(target)
    for folder in {source.parent, target.parent}:
        sync_folder(folder)
