"""Arrays of a safetensors file in float32, bfloat16 included, which numpy does not have."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.array_files import MAX_FILE_BYTES
from omnidraft_npu.documents import check_regular, shown_text
from omnidraft_npu.errors import BundleError

_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_arrays(path: Path) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, str]]:
    """Arrays by name, and the file's metadata.

    Raises:
        BundleError: it cannot be read, or holds another type.
    """
    from safetensors import SafetensorError, deserialize, safe_open

    advice = "save the adapter again"
    check_regular(path, advice=advice, max_bytes=MAX_FILE_BYTES)
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
        entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        return {name: _array(entry) for name, entry in entries}, metadata
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = shown_text(str(error))
        raise BundleError(f"{path} cannot be read ({reason}): {advice}") from error


def read_metadata(path: Path) -> dict[str, str]:
    """A file's metadata; empty for what is no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path, advice="", max_bytes=MAX_FILE_BYTES)
        with safe_open(path, "numpy") as file:
            return dict(file.metadata() or {})
    except (BundleError, OSError, ValueError, SafetensorError):
        return {}


def _array(entry: dict[str, Any]) -> npt.NDArray[np.float32]:
    if entry["dtype"] not in _TYPES:
        raise ValueError(f"its type is {entry['dtype']}")
    array = np.frombuffer(entry["data"], _TYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
