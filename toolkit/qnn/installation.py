"""What of QNN is installed here, and whether this process can load it."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import DeviceError
from .libraries import is_cut_short, is_loadable, machine_of, process_machine
from .versions import check_packages


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The libraries that onnxruntime-qnn brings."""

    provider: Path
    """What onnxruntime registers."""
    htp: Path
    """The backend of the Hexagon tensor processor; on x86_64 it simulates one."""

    @property
    def system(self) -> Path:
        """What reads context binaries; onnxruntime names it only in its log when it is missing."""
        return self.htp.with_name(self.htp.name.replace("Htp", "System"))

    @property
    def libraries(self) -> tuple[Path, ...]:
        """All that this process itself loads."""
        return self.provider, self.htp, self.system


def is_simulator_host() -> bool:
    """Whether QNN's HTP library for this process is the simulator, as it is on x86_64."""
    return process_machine() == "x86_64"


def find_installation() -> Installation:
    """The installed libraries, after checking versions and machine types.

    Raises:
        DeviceError: a package is missing or of a version that does not fit, or a library is
            missing or for another processor; says which and what to do.
    """
    for package in check_packages():
        if package.problem is not None:
            raise DeviceError(package.problem)
    found = installed_libraries()
    for library in found.libraries:
        if (problem := library_problem(library)) is not None:
            raise DeviceError(problem)
    return found


def installed_libraries() -> Installation:
    """Where onnxruntime-qnn says its libraries are, unchecked.

    Raises:
        DeviceError: the package itself cannot be imported.
    """
    try:
        import onnxruntime_qnn

        return Installation(
            provider=Path(onnxruntime_qnn.get_library_path()),
            htp=Path(onnxruntime_qnn.get_qnn_htp_path()),
        )
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(
            f"onnxruntime-qnn cannot be loaded ({error}): reinstall it with "
            "`pip install --force-reinstall onnxruntime-qnn`"
        ) from error


def library_problem(library: Path) -> str | None:
    """Why this process cannot load a library, in one line; None where it should."""
    fix = "reinstall it with `pip install --force-reinstall onnxruntime-qnn`"
    try:
        machine = machine_of(library)
    except FileNotFoundError:
        return f"the QNN library {library} is missing: {fix}"
    except OSError as error:
        return f"the QNN library {library} cannot be read ({error.strerror}): {fix}"
    if machine is None:
        return f"the QNN library {library} is damaged, it is no library at all: {fix}"
    process = process_machine()
    if not is_loadable(machine, process):
        return (
            f"the QNN library {library} is for {machine}, this Python is for {process}: "
            f"use a Python for {machine}, or {fix}"
        )
    if is_cut_short(library):
        return f"the QNN library {library} is damaged, it is cut short: {fix}"
    return None
