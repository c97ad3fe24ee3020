"""What this machine and this installation are, for records of measurements."""

import importlib.metadata
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

from . import __version__
from .errors import ConfigError

logger = logging.getLogger(__name__)

_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-qnn", "tokenizers")


def describe_machine() -> dict[str, Any]:
    """System, processor and versions by name; None for a package that is not installed."""
    return {
        "omnidraft_npu": __version__,
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
    }


def usable_threads(threads: int | None) -> int | None:
    """The threads that were asked for, at most one a processor; None stays None.

    Raises:
        ConfigError: fewer than 1.
    """
    if threads is None:
        return None
    if threads < 1:
        raise ConfigError(f"threads is {threads}, must be at least 1: use --threads 1 or more")
    most = os.cpu_count() or 1
    if threads > most:
        logger.warning("--threads %d: one for each of the %d processors is used", threads, most)
    return min(threads, most)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
