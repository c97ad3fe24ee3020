"""Memory: the peak of this process, on Linux, macOS and Windows, and what is left."""

import ctypes
import sys
from pathlib import Path


def peak_rss_bytes() -> int | None:
    """Largest resident set so far, in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return _windows_peak()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_children_rss_bytes() -> int | None:
    """Largest resident set of any finished child so far, in bytes; None where not told."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int | None:
    """Memory that can be had without swapping, in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


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
