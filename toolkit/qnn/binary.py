"""What a context binary says of itself: the chips it is for and the QNN that made it.

QNN on a device refuses a wrong one with a number, the simulator takes any. So the binary is
read before it is loaded.
"""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from ..chips.table import Chip
from ..errors import BundleError

_TARGET = re.compile(rb"soc_type=([^;]{0,40});arch=(\d{1,3})")
_SDK = re.compile(rb"v(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.\d{6,}")
_BINARY = re.compile(rb"ep_cache_context\"(.)([^\0]{1,120}?\.bin)", re.DOTALL)

Sdk = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ContextBinary:
    """A compiled graph."""

    path: Path
    """The file that holds the binary: one of its own, or the graph's if it is embedded."""
    targets: tuple[tuple[str, int], ...]
    """QNN's name and Hexagon version of every chip it is for."""
    sdk: Sdk | None
    """Version of the QNN that made it; None where it does not say."""


def read_context_binary(graph: Path) -> ContextBinary:
    """Read the binary of a graph that holds one or names the file beside it.

    Raises:
        BundleError: a file is missing, or holds no context binary.
    """
    fix = "export the bundle again for this chip"
    try:
        text = graph.read_bytes()
        named = _BINARY.search(text)
        path = graph
        if named is not None and named[1][0] == len(named[2]):
            path = graph.with_name(named[2].decode("utf-8", "replace"))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            targets = {(name.decode(), int(arch)) for name, arch in _TARGET.findall(content)}
            made_by = _SDK.search(content) or _SDK.search(text)
            sdk = tuple(map(int, made_by.groups())) if made_by else None
    except FileNotFoundError as error:
        raise BundleError(f"{error.filename} is missing: {fix}") from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{graph} cannot be read ({error}): {fix}") from error
    if not targets:
        raise BundleError(f"{path} holds no context binary of QNN: {fix}")
    return ContextBinary(
        path=path,
        targets=tuple(sorted(targets)),
        sdk=sdk,
    )


def check_context_binary(binary: ContextBinary, chip: Chip, installed_sdk: Sdk | None) -> None:
    """Pass if a chip with the QNN installed here can load the binary.

    Args:
        binary: What was read.
        chip: The chip it is to be loaded on.
        installed_sdk: Version of the QNN here; None where that is not known.

    Raises:
        BundleError: it is for another chip, or was made by a newer QNN.
    """
    known = chip.simulated
    wanted = f"{chip.name} (v{chip.arch})"
    if known is not None and (known.name, known.arch) not in binary.targets:
        found = ", ".join(f"{name} (v{arch})" for name, arch in binary.targets)
        raise BundleError(
            f"{binary.path} is for {found}, not for {wanted}: "
            f"export the bundle again with --soc {chip.key}"
        )
    if known is None and chip.arch not in {arch for _, arch in binary.targets}:
        found = ", ".join(f"v{arch}" for _, arch in binary.targets)
        raise BundleError(
            f"{binary.path} is for Hexagon {found}, not for {wanted}: "
            f"export the bundle again with --soc {chip.key}"
        )
    if binary.sdk is not None and installed_sdk is not None and binary.sdk > installed_sdk:
        made, here = (".".join(map(str, sdk)) for sdk in (binary.sdk, installed_sdk))
        raise BundleError(
            f"{binary.path} was made by QNN {made}, here is the older {here}: "
            "pip install --upgrade onnxruntime-qnn, or export the bundle again with this one"
        )


def installed_sdk() -> Sdk | None:
    """Version of the QNN libraries that onnxruntime-qnn brought; None if it does not say."""
    try:
        from onnxruntime_qnn import build_and_package_info
    except ImportError:
        return None
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", getattr(build_and_package_info, "qnn_version", ""))
    return tuple(map(int, found.groups())) if found else None
