"""Try one backend of QNN in a process of its own, which a crash cannot take along.

`python -m omnidraft_npu.qnn.probe htp` prints one JSON document.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .first_load import status_text

_LOGGED = re.compile(r"QNN SetupBackend failed ([^\x1b\n]+)")
"""Why a backend cannot be had; onnxruntime tells its log only."""

BACKENDS = ("htp", "gpu", "cpu")
TIMEOUT_S = 90.0
_SIMULATED_SOC = 60
_MAX_ERROR = 0.05
"""Relative error of a product that an fp16 or bf16 unit keeps well below."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a backend answered."""

    backend: str
    is_working: bool
    answer: str
    """What it said, or how its process ended."""
    devices: tuple[str, ...] = ()
    """Kinds of hardware that QNN found: NPU, GPU, CPU."""


def probe_backend(backend: str, *, timeout_s: float = TIMEOUT_S) -> Probe:
    """Start a process that runs a small product on the backend, and wait for it."""
    command = [sys.executable, "-m", __spec__.name, backend]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        answer = f"no answer in {timeout_s:.0f} s; the process was stopped"
        return Probe(backend=backend, is_working=False, answer=answer)
    except OSError as error:
        answer = f"the process that tries it cannot be started ({error.strerror})"
        return Probe(backend=backend, is_working=False, answer=answer)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        answer = f"its process ended with {status_text(done.returncode)} ({said[0]})"
        return Probe(backend=backend, is_working=False, answer=answer)
    found = _answer_in(done.stdout)
    if found is None:
        answer = "its process ended without an answer"
        return Probe(backend=backend, is_working=False, answer=answer)
    if not found.is_working and (logged := _LOGGED.search(done.stderr)):
        found = replace(found, answer=logged[1].strip())
    return replace(found, backend=backend)


def _answer_in(printed: str) -> Probe | None:
    """The last line that is an answer; native libraries print lines of their own as they end."""
    for line in reversed(printed.splitlines()):
        try:
            answer = json.loads(line)
            return Probe(backend="", **{**answer, "devices": tuple(answer["devices"])})
        except (ValueError, TypeError, KeyError):
            continue
    return None


def _try_backend(backend: str) -> dict[str, Any]:
    """Open and run a small product; says what came of it."""
    from ..errors import DeviceError
    from .installation import find_installation, is_simulator_host
    from .provider import HtpDevice, qnn_devices

    try:
        installation = find_installation()
        every = qnn_devices(installation)
    except DeviceError as error:
        found = str(error).rpartition(": ")[0]  # what follows is what to do, or to ask doctor
        return {"is_working": False, "answer": found, "devices": []}
    kinds = {str(device.device.type).rpartition(".")[2]: device for device in every}
    wanted = {"htp": "NPU", "gpu": "GPU", "cpu": "CPU"}[backend]
    ep_devices = tuple(d for d in every if d is kinds.get(wanted)) or every
    library = installation.htp.with_name(installation.htp.name.replace("Htp", backend.capitalize()))
    if not library.is_file():
        answer = f"onnxruntime-qnn brings no {library.name}"
        return {"is_working": False, "answer": answer, "devices": sorted(kinds)}
    device = HtpDevice(
        kind="simulator" if is_simulator_host() else "npu", library=library, ep_devices=ep_devices
    )
    is_working, answer = _multiply(device)
    return {"is_working": is_working, "answer": answer, "devices": sorted(kinds)}


def _multiply(device: Any) -> tuple[bool, str]:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from .provider import open_on
    from .this_chip import find_this_chip

    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 32), (32, 32)))
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32]) for name in ("x", "y")
    ]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node], "probe", values[:1], values[1:], [numpy_helper.from_array(w, "w")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    chip = find_this_chip()
    soc_model = _SIMULATED_SOC if chip is None else chip.soc_model
    options = {"backend_path": str(device.library), "soc_model": str(soc_model)}
    if device.kind == "npu" and chip is None:
        del options["soc_model"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.onnx"
        onnx.save(model, path)
        try:
            config = {"session.disable_cpu_ep_fallback": "1"}
            (y,) = open_on(device, path, options, config, is_quiet=False).run(None, {"x": x})
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
            return False, str(error).splitlines()[0].rpartition(" : ")[2]
    off = float(np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w))
    if not off < _MAX_ERROR:
        return False, f"its product is wrong by {100 * off:.0f} %"
    return True, f"runs; its product is right within {100 * off:.2g} %"


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_try_backend(sys.argv[1])) + "\n")
