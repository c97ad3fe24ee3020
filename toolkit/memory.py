"""Memory: the peak of this process, on Linux, macOS and Windows, and what is left."""

import ctypes
import sys
from pathlib import Path

from .errors import ResourceError

if sys.platform != "win32":
    import resource  # Here, as there may be no memory to load it with later.


def peak_rss_bytes() -> int | None:
    """Largest resident set so far, in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return _windows_peak()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_children_rss_bytes() -> int | None:
    """Largest resident set of any finished child so far, in bytes; None where not told."""
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Memory that this process can still have, in bytes; None where the system does not tell.

    The least of what the machine has without swapping, what a control group leaves and what
    `ulimit -v` leaves.
    """
    return _least(_machine_room("MemAvailable"), _group_room(), _address_room())


def require_memory(resident: int, reserved: int, what: str, remedy: str) -> None:
    """Pass where there is room: native code that gets no memory ends the process.

    Args:
        resident: Bytes that will be in memory for sure.
        reserved: Bytes of addresses that will be asked for, which `ulimit -v` bounds.
        what: What they are for, with its verb, for the message.
        remedy: What takes less.

    Raises:
        ResourceError: there is too little of one.
    """
    swap = _machine_room("SwapFree") or 0
    machine = _machine_room("MemAvailable")
    rooms = (
        (resident, _least(None if machine is None else machine + swap, _group_room())),
        (reserved, _address_room()),
    )
    for wanted, room in rooms:
        if room is not None and wanted > room:
            raise ResourceError(
                f"{what} takes about {size_text(wanted)} of memory and {size_text(room)} is "
                "free: close other programs, raise the limit where `ulimit -v` or a container "
                f"sets one, or {remedy}"
            )


def size_text(num_bytes: int) -> str:
    """A size for people, in MB of 10^6 bytes."""
    return f"{num_bytes / 1e6:,.1f} MB"


def _least(*rooms: int | None) -> int | None:
    return min((room for room in rooms if room is not None), default=None)


def _machine_room(kind: str) -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name == kind:
            return int(value.split()[0]) * 1024
    return None


def _group_room(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group of a container (version 2) leaves; files it can drop count as room."""
    limit, used = (_lines(folder / f"memory.{name}") for name in ("max", "current"))
    if not limit or not used or not limit[0].isdecimal():
        return None
    files = [line.split()[1] for line in _lines(folder / "memory.stat") if "inactive_file" in line]
    return max(0, int(limit[0]) - int(used[0]) + sum(map(int, files[:1])))


def _address_room() -> int | None:
    """What `ulimit -v` leaves."""
    if sys.platform == "win32":
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _lines(Path("/proc/self/statm"))
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return max(0, limit - int(pages[0].split()[0]) * resource.getpagesize())


def _lines(path: Path) -> list[str]:
    """Of a file of the system; none where it has no such file."""
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _windows_peak() -> int | None:
    """`PeakWorkingSetSize` of `GetProcessMemoryInfo` (psapi.h)."""

    class Counters(ctypes.Structure):
        _fields_ = (
            ("cb", ctypes.c_ulong),
            ("PageFaultCount", ctypes.c_ulong),
            ("PeakWorkingSetSize", ctypes.c_size_t),
            *(
                (name, ctypes.c_size_t)
                for name in (
                    "WorkingSetSize",
                    "QuotaPeakPagedPoolUsage",
                    "QuotaPagedPoolUsage",
                    "QuotaPeakNonPagedPoolUsage",
                    "QuotaNonPagedPoolUsage",
                    "PagefileUsage",
                    "PeakPagefileUsage",
                )
            ),
        )

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong)
    done = kernel.K32GetProcessMemoryInfo(
        kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb
    )
    return int(counters.PeakWorkingSetSize) if done else None
