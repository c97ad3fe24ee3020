"""The QNN simulator for tests: sessions on it, and how far from float32 they are."""

import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from omnidraft_npu.qnn.provider import open_qnn_session

X_ELITE = 60
"""QNN's number of the chip."""


def has_simulator() -> bool:
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


def open_simulated(path: Path, soc_model: int = X_ELITE) -> Any:
    """A strict session on the simulator; skips on machines that have none."""
    if not has_simulator():
        pytest.skip("the simulator of the HTP is for x86_64 Linux only")
    return open_qnn_session(path, soc_model=soc_model, simulate=True)


def relative_error(rows: npt.NDArray[np.float32], exact: npt.NDArray[np.float32]) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(rows - exact) / np.linalg.norm(exact))
