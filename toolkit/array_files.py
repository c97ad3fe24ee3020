"""Arrays of safetensors files from outside, with the types that were asked for.

The library itself checks that a header is whole, that every tensor lies in the file and that
none overlap; here the names, types and dimensions are checked, so that what follows can index.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from .documents import Count, check_regular, parse_document, shown_text
from .errors import BundleError, OmniDraftError

Arrays = dict[str, npt.NDArray[Any]]

MAX_FILE_BYTES = 2**32
_MAX_HEADER_BYTES = 100_000_000
"""As the library has it."""


def read_arrays(
    path: Path,
    kinds: Mapping[str, tuple[type[np.generic], int]] | None,
    *,
    error: type[OmniDraftError] = BundleError,
    advice: str,
    what: str = "a safetensors file",
    metadata_only: bool = False,
) -> tuple[Arrays, dict[str, str]]:
    """Arrays by name, and the file's metadata.

    Args:
        path: A safetensors file.
        kinds: Type and number of dimensions of every array by name; others are left alone. None
            for all arrays that there are, which must be float32.
        error: What is raised.
        advice: What the user should do about a file that does not fit.
        what: What the file should be.
        metadata_only: Give no arrays.

    Raises:
        OmniDraftError: of the class `error`; the file is missing, damaged, or lacks an array of
            that type.
    """
    from safetensors import SafetensorError, safe_open

    check_regular(path, error=error, advice=advice, max_bytes=MAX_FILE_BYTES)
    try:
        with safe_open(path, "numpy") as file:
            metadata = dict(file.metadata() or {})
            there = set(file.keys())
            names = [] if metadata_only else sorted(there) if kinds is None else list(kinds)
            if missing := [name for name in names if name not in there]:
                raise ValueError(f"it lacks {missing[0]}")
            arrays = {name: file.get_tensor(name) for name in names}
        for name, array in arrays.items():
            kind, ndim = (np.float32, array.ndim) if kinds is None else kinds[name]
            if array.dtype != kind or array.ndim != ndim:
                raise ValueError(f"it has {name} as {array.dtype} {list(array.shape)}")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
        reason = shown_text(str(problem).removeprefix("Error while deserializing header: "))
        raise error(f"{path} is not {what} that can be read ({reason}): {advice}") from problem
    return arrays, metadata


class _Entry(msgspec.Struct, frozen=True):
    dtype: Literal["I32"]
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


def map_int32(
    path: Path, names: Sequence[str], *, advice: str
) -> tuple[dict[str, npt.NDArray[np.int32]], dict[str, str]]:
    """int32 arrays of a file, memory-mapped, and its metadata.

    Raises:
        BundleError: the file is missing, damaged or lacks an array of that type.
    """
    where = path.name
    check_regular(path, advice=advice, shown=where, max_bytes=MAX_FILE_BYTES)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [
        ("metadata", dict[str, str], {}),
        *((name, _Entry) for name in names),
    ]
    kind = msgspec.defstruct("Header", fields, rename={"metadata": "__metadata__"}, kw_only=True)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
                raise BundleError(f"{where} is cut, or no safetensors file: {advice}")
            header: Any = parse_document(file.read(header_bytes), kind, where, advice=advice)
        if size == 8 + header_bytes:
            raise BundleError(f"{where} holds no arrays: {advice}")
        data = np.memmap(path, np.uint8, mode="r", offset=8 + header_bytes).view(np.ndarray)
    except OSError as problem:
        raise BundleError(f"{where} cannot be read ({problem.strerror}): {advice}") from problem
    arrays = {}
    for name in names:
        entry: _Entry = getattr(header, name)
        start, end = entry.data_offsets
        if not start <= end <= len(data) or end - start != 4 * math.prod(entry.shape):
            raise BundleError(f"{where} has {name} outside of the file: {advice}")
        arrays[name] = data[start:end].view("<i4").reshape(entry.shape)
    return arrays, header.metadata
