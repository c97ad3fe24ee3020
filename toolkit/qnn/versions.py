"""Versions of onnxruntime and of its QNN provider that work together."""

import importlib.metadata
import re
from dataclasses import dataclass

Version = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package against the versions that this tool can use."""

    name: str
    installed: str | None
    """None where it is not installed."""
    lowest: Version
    below: Version
    reason: str = ""
    """Why the lowest one is the lowest."""

    @property
    def needed(self) -> str:
        """The range as pip writes it."""
        return f">={_text(self.lowest)},<{_text(self.below)}"

    @property
    def fix(self) -> str:
        """The command that installs a version of the range."""
        return f"pip install '{self.name}{self.needed}'"

    @property
    def problem(self) -> str | None:
        """What is wrong and what to do, in one line; None where nothing is."""
        if self.installed is None:
            return f"{self.name} is not installed: {self.fix}"
        if not self.lowest <= _parse(self.installed) < self.below:
            return f"{self.name} {self.installed} is not {self.needed}{self.reason}: {self.fix}"
        return None


def check_packages() -> tuple[Package, Package]:
    """onnxruntime and onnxruntime-qnn as they are installed."""
    core = installed_version("onnxruntime")
    lowest, reason = (2, 3, 0), ""
    if core is not None and _parse(core) >= (1, 27, 0):
        # Earlier ones do not say which interface of onnxruntime they support, and 1.27 asks
        # (onnxruntime-qnn issue 492).
        lowest, reason = (2, 4, 0), f", which onnxruntime {core} needs"
    return (
        Package(name="onnxruntime", installed=core, lowest=(1, 24, 2), below=(2, 0, 0)),
        Package(
            name="onnxruntime-qnn",
            installed=installed_version("onnxruntime-qnn"),
            lowest=lowest,
            below=(3, 0, 0),
            reason=reason,
        ),
    )


def installed_version(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse(version: str) -> Version:
    numbers = [int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def _text(version: Version) -> str:
    return ".".join(map(str, version)).removesuffix(".0").removesuffix(".0")
