"""The first load of context binaries on a machine, in a process of its own: QNN may crash on one.

`python -m omnidraft_npu.qnn.first_load 60 model_ctx.onnx` ends with 0 where they load. What came
of it is kept in the local store, so that every other run loads them at once.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import BundleError, ConfigError, DeviceError
from ..files import write_json
from ..store.local import store_folder
from .binary import installed_qnn_version
from .this_chip import find_this_chip

logger = logging.getLogger(__name__)

TIMEOUT_S = 300.0
_REFUSED = 10
"""How the process ends where QNN raised an error, which the caller will see as well."""
_LARGEST_STATUS = 127
"""Status of a process that ended by itself; a crash gives a signal, or on Windows a large one."""


def check_first_load(
    graphs: Sequence[Path],
    digests: Sequence[str],
    *,
    soc_model: int,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Pass where graphs with context binaries load, or fail without harm to their process.

    Args:
        graphs: Of one model, to be loaded together.
        digests: Content hashes of their binaries.
        soc_model: QNN's number of the chip.
        timeout_s: After so long a process that says nothing is stopped.

    Raises:
        DeviceError: their process crashed or hung, now or in an earlier run.
    """
    path = _outcome_path(digests, soc_model)
    crash = _read_outcome(path)
    if crash is None:
        logger.info("loading the NPU's binaries for the first time, in a process of its own")
        crash = _load_in_child(graphs, soc_model, timeout_s)
        _keep_outcome(path, crash)
    if crash:
        raise DeviceError(
            f"QNN {crash} while it loaded {graphs[0].parent}: update the NPU driver and "
            f"onnxruntime-qnn, or export the bundle again; to try it once more, delete {path}"
        )


def _outcome_path(digests: Sequence[str], soc_model: int) -> Path:
    """Where the outcome for these binaries, this QNN and this machine is kept."""
    chip = find_this_chip()
    facts = [
        sorted(digests),
        soc_model,
        installed_qnn_version(),
        importlib.metadata.version("onnxruntime"),
        platform.platform(),
        platform.version(),
        None if chip is None else chip.key,
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return store_folder() / "first-loads" / f"{key}.json"


def _read_outcome(path: Path) -> str | None:
    """How the process ended, empty where all is well; None where that is not known."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["crash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _keep_outcome(path: Path, crash: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"crash": crash})
    except OSError as error:
        logger.info("how the first load went cannot be kept in %s (%s)", path, error.strerror)


def _load_in_child(graphs: Sequence[Path], soc_model: int, timeout_s: float) -> str:
    """How a process that loads the graphs crashed; empty where it did not.

    Raises:
        DeviceError: it cannot be started.
    """
    try:
        done = subprocess.run(
            _command(graphs, soc_model),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"gave no answer in {timeout_s:.0f} s"
    except OSError as error:
        raise DeviceError(
            "the NPU's binaries are loaded in a process of their own first, which cannot be "
            f"started ({error.strerror}): use the CPU"
        ) from error
    if 0 <= done.returncode <= _LARGEST_STATUS:
        return ""
    return f"crashed ({status_text(done.returncode)})"


def status_text(status: int) -> str:
    """The end of a process for people: the name of a signal, or the number."""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status:#x}" if status > _LARGEST_STATUS else f"status {status}"


def _command(graphs: Sequence[Path], soc_model: int) -> list[str]:
    # An absolute path: the process need not start in the same folder.
    names = [str(path.absolute()) for path in graphs]
    return [sys.executable, "-m", __spec__.name, str(soc_model), *names]


def _load(soc_model: int, graphs: Sequence[str]) -> int:
    from .provider import open_qnn_session

    try:
        # All at once, as the caller will hold them.
        _ = [open_qnn_session(Path(path), soc_model=soc_model, simulate=True) for path in graphs]
    except (BundleError, ConfigError, DeviceError):
        return _REFUSED
    return 0


if __name__ == "__main__":
    status = _load(int(sys.argv[1]), sys.argv[2:])
    # Without the cleaning up of native code, which is no part of the question.
    os._exit(status)
