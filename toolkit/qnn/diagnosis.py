"""What of QNN works on this machine, what does not, and what to do about it."""

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..chips.table import Chip
from ..errors import DeviceError
from .binary import installed_qnn_version
from .installation import Installation, installed_libraries, library_problem
from .libraries import machine_of, process_machine
from .probe import BACKENDS, Probe, probe_backend
from .this_chip import find_this_chip
from .versions import check_packages

Status = Literal["ok", "note", "wrong"]

_NODES = ("fastrpc-cdsp", "fastrpc-cdsp-secure", "adsprpc-smd", "adsprpc-smd-secure")
"""Devices of the kernel through which a process reaches the NPU; one of them is enough."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    """`note` is worth knowing and stands in nobody's way."""
    found: str
    fix: str | None = None
    """What to do about it, as a command where there is one."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a diagnosis looks at, apart from what is installed."""

    system: str
    """`linux`, `win32` and so on."""
    machine: str
    """What this process can load: `x86_64` or `arm64`."""
    processor: str
    """What the processor calls itself."""
    environment: Mapping[str, str]
    devices: Path
    """Folder of the kernel's device nodes."""

    @property
    def is_emulated(self) -> bool:
        """Whether this is an x86_64 process on an ARM64 processor."""
        return self.machine == "x86_64" and "ARM" in self.processor.upper()

    @property
    def may_have_npu(self) -> bool:
        """Whether there can be an NPU of Qualcomm here, as far as the system says."""
        if self.machine == "x86_64":
            return self.is_emulated
        if self.system == "linux":
            has_node = any((self.devices / name).exists() for name in _NODES)
            return has_node or find_this_chip() is not None
        return self.system == "win32"


def this_host() -> Host:
    """The machine that this process runs on."""
    return Host(
        system=sys.platform,
        machine=process_machine(),
        processor=f"{platform.machine()} {platform.processor()}",
        environment=os.environ,
        devices=Path("/dev"),
    )


def diagnose(
    host: Host | None = None, probe: Callable[[str], Probe] = probe_backend
) -> Iterator[Finding]:
    """Look at everything, from versions to what the backends answer.

    Args:
        host: The machine; None for this one.
        probe: Tries one of `BACKENDS` where a crash does no harm.

    Yields:
        A finding as soon as it is there.
    """
    host = host or this_host()
    yield _python(host)
    packages = check_packages()
    for package in packages:
        yield Finding(
            name=package.name,
            status="wrong" if package.problem else "ok",
            found=f"{package.installed or 'not installed'}, needed is {package.needed}",
            fix=package.fix if package.problem else None,
        )
    if packages[1].installed is None:
        return
    try:
        installation = installed_libraries()
    except DeviceError as error:
        found, _, fix = str(error).rpartition(": ")
        yield Finding(name="onnxruntime-qnn", status="wrong", found=found, fix=fix)
        return
    libraries = list(_libraries(installation))
    yield from libraries
    if any(p.problem for p in packages) or any(one.status == "wrong" for one in libraries):
        found = "none was tried, for what is wrong above would only be said again"
        yield Finding(name="backends", status="note", found=found)
        return
    chip = find_this_chip()
    if chip is not None and chip.is_too_old:
        yield Finding(name="NPU", status="note", found=f"{chip.why_too_old}; models run on the CPU")
        return
    probes = [probe(backend) for backend in BACKENDS]
    for one in probes:
        yield _backend(one)
    yield from _npu(host, probes[0], installation.htp.parent, chip)


def _python(host: Host) -> Finding:
    found = f"{platform.python_version()} for {host.machine}"
    if host.is_emulated:
        return Finding(
            name="python",
            status="wrong",
            found=f"{found} on an ARM64 processor: it is emulated and cannot reach the NPU",
            fix="install Python for ARM64 and omnidraft-npu in it",
        )
    return Finding(name="python", status="ok", found=found)


def _libraries(installation: Installation) -> Iterator[Finding]:
    """Those that are missing or do not fit this process, or one line for all where all do."""
    folder = installation.htp.parent
    names = [path for pattern in ("*.so", "*.dll") for path in sorted(folder.glob(pattern))]
    own = dict.fromkeys(installation.libraries)
    own |= dict.fromkeys(path for path in names if _machine(path) != "hexagon")
    wrong = [problem for path in own if (problem := library_problem(path)) is not None]
    for problem in wrong:
        found, _, fix = problem.rpartition(": ")
        yield Finding(name="QNN libraries", status="wrong", found=found, fix=fix)
    if not wrong:
        found = f"{len(own)} for {process_machine()} in {folder}, QNN {installed_qnn_version()}"
        yield Finding(name="QNN libraries", status="ok", found=found)


def _machine(path: Path) -> str | None:
    try:
        return machine_of(path)
    except OSError:
        return None


def _backend(probe: Probe) -> Finding:
    is_needed = probe.backend == "htp"
    if probe.is_working:
        status: Status = "ok"
    else:
        status = "wrong" if is_needed else "note"
    return Finding(
        name=f"backend {probe.backend}",
        status=status,
        found=probe.answer if status != "note" else "does not run here, and no model needs it",
        fix=None
        if status == "ok" or not is_needed
        else "pip install --force-reinstall onnxruntime-qnn, and on a Snapdragon update its NPU "
        "driver",
    )


def _npu(host: Host, htp: Probe, libraries: Path, chip: Chip | None) -> Iterator[Finding]:
    what = "unknown" if chip is None else f"{chip.name} (v{chip.arch})"
    if "NPU" in htp.devices:
        yield Finding(name="NPU", status="ok", found=f"present; the chip is {what}")
    elif host.machine == "x86_64" and not host.is_emulated:
        yield Finding(
            name="NPU",
            status="note",
            found="none, as this is an x86_64 machine: models run on its CPU, and with "
            "--simulate on a slow simulator",
        )
        return
    else:
        yield Finding(
            name="NPU",
            status="wrong",
            found=f"none: QNN sees {', '.join(htp.devices) or 'no device'}; the chip is {what}",
            fix="install the NPU driver of Qualcomm for this board or laptop",
        )
    if host.system == "linux":
        yield _device_node(host)
        yield _adsp_path(host, libraries, None if chip is None else chip.arch)


def _device_node(host: Host) -> Finding:
    nodes = [host.devices / name for name in _NODES if (host.devices / name).exists()]
    usable = [node for node in nodes if os.access(node, os.R_OK)]
    if usable:
        return Finding(name="kernel", status="ok", found=f"{usable[0]} can be opened")
    if nodes:
        return Finding(
            name="kernel",
            status="wrong",
            found=f"{nodes[0]} is there, and this user may not open it",
            fix=f"add this user to the group of {nodes[0]}, then log in again",
        )
    return Finding(
        name="kernel",
        status="wrong",
        found=f"no way to the NPU: {host.devices} has none of {', '.join(_NODES)}",
        fix="use the vendor's kernel with FastRPC",
    )


def _adsp_path(host: Host, libraries: Path, arch: int | None) -> Finding:
    """Whether the NPU will find the Hexagon libraries, which it loads by itself."""
    wanted = f"libQnnHtpV{arch or '*'}Skel.so"
    value = host.environment.get("ADSP_LIBRARY_PATH", "")
    folders = [Path(folder) for folder in value.replace(":", ";").split(";") if folder]
    holding = [folder for folder in folders if any(folder.glob(wanted))]
    if holding:
        return Finding(name="ADSP_LIBRARY_PATH", status="ok", found=f"{wanted} is in {holding[0]}")
    if any(libraries.glob(wanted)):
        fix = f"export ADSP_LIBRARY_PATH='{libraries};/usr/lib/rfsa/adsp'"
    else:
        fix = f"onnxruntime-qnn brings no {wanted}: install the QAIRT SDK and name its folder"
    found = f"is {value!r}, where {wanted} is not" if value else "is not set"
    return Finding(name="ADSP_LIBRARY_PATH", status="wrong", found=found, fix=fix)
