"""Which chips and which QNN a context binary was made for, read back from its own file.

QNN on a device refuses a wrong one with a number, the simulator takes any. So the binary is
read before it is loaded.
"""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from ..chips.table import Chip
from ..errors import BundleError

_TARGET = re.compile(rb"soc_type=([^;\0]{1,40});arch=(\d{2,3})(?!\d)")
_NAMED = re.compile(rb"ep_cache_context\"(.)([^\0]{1,120}?\.bin)", re.DOTALL)
_MADE_BY = re.compile(rb"ep_sdk_version\".v?(\d+\.\d+\.\d+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ContextBinary:
    """A graph that holds a context binary, and what the two say of themselves."""

    path: Path
    """The graph."""
    binary: Path
    """The file that holds the binary: one beside the graph, or the graph if it is embedded."""
    targets: tuple[tuple[str, int], ...]
    """Name and Hexagon version of every chip it was compiled for, as QNN spells them."""
    qnn_version: str
    """Of the QNN that made it; empty where the graph does not say."""


def read_context_binary(path: Path) -> ContextBinary:
    """Read a graph and its context binary, without parsing either.

    Raises:
        BundleError: one of the two is missing, or is no such file.
    """
    fix = "export the bundle again for this chip"
    try:
        graph = path.read_bytes()
        named = _NAMED.search(graph)
        is_apart = named is not None and named[1][0] == len(named[2])
        name = named[2].decode("utf-8", "replace") if named and is_apart else path.name
        binary = path.with_name(name)
        with (
            binary.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            targets = {(m[1].decode("latin-1"), int(m[2])) for m in _TARGET.finditer(content)}
    except FileNotFoundError as error:
        raise BundleError(f"{error.filename} is missing: {fix}") from error
    except (OSError, ValueError) as error:  # ValueError: an empty file, or a name with folders
        raise BundleError(f"{path} and its binary cannot be read ({error}): {fix}") from error
    if not targets:
        raise BundleError(f"{binary} holds no context binary of QNN: {fix}")
    made_by = _MADE_BY.search(graph)
    return ContextBinary(
        path=path,
        binary=binary,
        targets=tuple(sorted(targets)),
        qnn_version=made_by[1].decode() if made_by else "",
    )


def check_context_binary(path: Path, chip: Chip, *, qnn_version: str | None = None) -> None:
    """Pass if a graph's context binary is one that a chip and a QNN can load.

    Args:
        path: The graph.
        chip: Where it is to run.
        qnn_version: Of the QNN installed there; None or empty to leave that out.

    Raises:
        BundleError: it was compiled for another chip, or by a newer QNN; names the difference.
    """
    found = read_context_binary(path)
    wanted = chip.simulated
    is_right = (
        chip.arch in {arch for _, arch in found.targets}
        if wanted is None
        else (wanted.name, wanted.arch) in found.targets
    )
    if not is_right:
        made_for = " and ".join(f"{name} (v{arch})" for name, arch in found.targets)
        raise BundleError(
            f"{found.binary} was compiled for {made_for}, not for {chip.name} (v{chip.arch}): "
            f"export the bundle again with --soc {chip.key}"
        )
    if qnn_version and found.qnn_version and _numbers(found.qnn_version) > _numbers(qnn_version):
        raise BundleError(
            f"{found.binary} was made by QNN {found.qnn_version}, here is the older "
            f"{qnn_version}: pip install --upgrade onnxruntime-qnn, or export the bundle again "
            "with this one"
        )


def installed_qnn_version() -> str:
    """Version of the QNN in the installed onnxruntime-qnn; empty where there is none."""
    try:
        from onnxruntime_qnn.build_and_package_info import qnn_version
    except ImportError:
        return ""
    return str(qnn_version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
