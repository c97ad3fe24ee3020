"""Sessions on the QNN provider: the one place that registers it and opens graphs on it.

onnxruntime's own list of providers proves nothing here: the QNN provider is a plug-in that
never shows there, and a session may name it and still run every node on the CPU. So devices
are enumerated, sessions are strict, and where the nodes went is read back.
"""

import functools
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import BundleError, DeviceError
from ..system_errors import limit_reached
from .installation import Installation, find_installation, is_simulator_host
from .options import check_options
from .stdout import stdout_fd_to_stderr

if TYPE_CHECKING:
    import onnxruntime as ort

QNN_PROVIDER = "QNNExecutionProvider"
_CONTEXT_BINARY = "EpContext"
"""What onnxruntime says where a context binary is at fault."""
_ERRORS, _FATAL_ONLY = 3, 4
"""Errors come as exceptions; the log would tell each one three times more, in colour."""


@dataclass(frozen=True, kw_only=True)
class HtpDevice:
    """What runs HTP graphs in this process."""

    kind: Literal["npu", "simulator"]
    library: Path
    """The backend that runs them."""
    ep_devices: tuple[Any, ...]
    """onnxruntime's handles."""

    def describe(self, soc_model: int) -> str:
        """What a model on it really runs on, for statistics."""
        what = "HTP" if self.kind == "npu" else "simulated HTP"
        return f"{QNN_PROVIDER} ({what}, soc {soc_model})"


def find_htp(*, simulate: bool) -> HtpDevice:
    """The NPU of this machine, or with `simulate`, where there is none, the simulator.

    Raises:
        DeviceError: neither is there; says why and what to do.
    """
    if sys.platform not in ("linux", "win32"):
        raise DeviceError(f"QNN has no NPU on {sys.platform}: use the CPU")
    if is_simulator_host() and not simulate:
        raise DeviceError(
            "there is no NPU for an x86_64 process: on a Snapdragon use a Python for ARM64, "
            "elsewhere --simulate, which is slow"
        )
    installation = find_installation()
    devices = qnn_devices(installation)
    import onnxruntime as ort

    npus = tuple(d for d in devices if d.device.type == ort.OrtHardwareDeviceType.NPU)
    if npus:
        return HtpDevice(kind="npu", library=installation.htp, ep_devices=npus)
    if not is_simulator_host():
        raise DeviceError(
            "QNN finds no NPU here: install Qualcomm's NPU driver, or use the CPU; "
            "`omnidraft-npu doctor` says more"
        )
    return HtpDevice(kind="simulator", library=installation.htp, ep_devices=devices)


def open_qnn_session(
    path: Path,
    *,
    soc_model: int,
    simulate: bool,
    options: Mapping[str, str] = MappingProxyType({}),
    config: Mapping[str, str] = MappingProxyType({}),
) -> "ort.InferenceSession":
    """A session whose nodes all run on QNN, in which no run can move to the CPU.

    Args:
        path: A static graph, or one that holds a context binary.
        soc_model: QNN's number of the chip.
        simulate: Whether the simulator may stand in for a missing NPU.
        options: More QNN options; see `OPTIONS`.
        config: More session configuration entries, `ep.context_enable` for example.

    Raises:
        DeviceError: there is no device, or a node of the graph cannot run on it.
        BundleError: the file is missing, or holds a context binary that QNN does not load.
        ConfigError: an option that QNN would ignore.
    """
    if not path.is_file():
        raise BundleError(f"{path} is missing: export the model again")
    device = find_htp(simulate=simulate)
    chosen = {"backend_path": str(device.library), "soc_model": str(soc_model)}
    if device.kind == "npu":
        chosen["htp_performance_mode"] = "burst"
    chosen = check_options(chosen | dict(options))
    try:
        session = open_on(device, path, chosen, {"session.disable_cpu_ep_fallback": "1", **config})
    except Exception as error:
        kind = BundleError if _CONTEXT_BINARY in str(error) else DeviceError
        raise limit_reached(error) or kind(
            f"{path} cannot be opened on QNN for soc_model {chosen['soc_model']}: "
            f"{_reason(error, path, device, chosen)}"
        ) from error
    placed = placement(session)
    if set(placed) != {QNN_PROVIDER}:
        raise DeviceError(f"{path} did not go to QNN as a whole but to {placed}: export it again")
    return session


def placement(session: "ort.InferenceSession") -> dict[str, int]:
    """Nodes of the graph by the provider that runs them.

    Args:
        session: One that recorded where its nodes went, as `open_qnn_session`'s do.
    """
    nodes: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        nodes[str(part.ep_name)] += len(part.get_nodes())
    return dict(nodes)


def open_on(
    device: HtpDevice,
    path: Path,
    options: Mapping[str, str],
    config: Mapping[str, str],
    *,
    is_quiet: bool = True,
) -> "ort.InferenceSession":
    """A session with checked options on a device; whatever onnxruntime raises passes through."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL_ONLY if is_quiet else _ERRORS
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, value in config.items():
        settings.add_session_config_entry(name, value)
    settings.add_provider_for_devices(list(device.ep_devices), dict(options))
    with stdout_fd_to_stderr():
        session = ort.InferenceSession(str(path), settings)
    session.disable_fallback()
    return session


def _reason(error: Exception, path: Path, device: HtpDevice, options: Mapping[str, str]) -> str:
    """Why a strict session failed: of a graph that QNN took in part, what it left."""
    said = str(error).splitlines()[0].rpartition(" : ")[2].rstrip(".")
    if _CONTEXT_BINARY in said:
        return f"{said}; export the bundle again with the onnxruntime-qnn that is installed here"
    if "fallback to CPU EP has been explicitly disabled" not in said:
        return f"{said}; `omnidraft-npu doctor` checks the device"
    try:
        parts = open_on(device, path, options, {}).get_provider_graph_assignment_info()
    except Exception:  # noqa: BLE001  # the first error is the one to tell
        return f"{said}; `omnidraft-npu doctor` checks the device"
    if all(part.ep_name != QNN_PROVIDER for part in parts):
        return "it takes no node of the graph; is this a chip it knows (`omnidraft-npu devices`)?"
    left = sorted(
        {str(n.op_type) for p in parts if p.ep_name != QNN_PROVIDER for n in p.get_nodes()}
    )
    return f"it does not take {', '.join(left[:5])}; export the model again for this chip"


def qnn_devices(installation: Installation) -> tuple[Any, ...]:
    """onnxruntime's QNN devices; the library is registered once a process.

    Raises:
        DeviceError: it cannot be registered, or was before this process was forked, which
            QNN does not survive.
    """
    pid, devices = _register_once(installation.provider)
    if pid != os.getpid():
        raise DeviceError(
            "QNN was started before this process was forked and would hang in it: start "
            "processes with multiprocessing's `spawn`"
        )
    return devices


@functools.cache
def _register_once(library: Path) -> tuple[int, tuple[Any, ...]]:
    import onnxruntime as ort

    if not _devices():
        try:
            with stdout_fd_to_stderr():
                ort.register_execution_provider_library(QNN_PROVIDER, str(library))
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise DeviceError(
                f"the QNN library {library} cannot be loaded ({reason}): `omnidraft-npu doctor` "
                f"says more{_board_hint()}"
            ) from error
    return os.getpid(), _devices()


def _devices() -> tuple[Any, ...]:
    import onnxruntime as ort

    return tuple(d for d in ort.get_ep_devices() if d.ep_name == QNN_PROVIDER)


def _board_hint() -> str:
    if sys.platform == "linux" and "ADSP_LIBRARY_PATH" not in os.environ:
        return "; on a board, ADSP_LIBRARY_PATH must name the folder of the Hexagon libraries"
    return ""
