"""A tensor that lies in a file: where it is, how it is encoded, and reading it as float32.

Reading costs the float32 result and one block of a few MB, whatever the encoding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import CheckpointError

FLOAT_ENCODINGS = ("F32", "F16", "BF16")
SCALED_ENCODING = "I8"
"""Whole numbers, read together with a tensor of scales, one a row."""
BLOCK_ENCODINGS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

# Values an encoding decodes at a time, and the bytes they take in the file.
_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "I8": (1, 1),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

_VALUES_A_READ = 1 << 20


def stored_bytes(shape: tuple[int, ...], encoding: str) -> int:
    """Bytes that a tensor of a supported encoding takes in its file."""
    values, size = _BLOCKS[encoding]
    return prod(shape) // values * size


def fits_blocks(shape: tuple[int, ...], encoding: str) -> bool:
    """Whether rows of a supported encoding are whole blocks."""
    return not shape or shape[-1] % _BLOCKS[encoding][0] == 0


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Place, shape and encoding of one tensor."""

    name: str
    """As the file calls it."""
    path: Path
    offset: int
    """Bytes from the start of the file."""
    shape: tuple[int, ...]
    """Slowest dimension first."""
    encoding: str
    """One of `FLOAT_ENCODINGS`, of ggml's `BLOCK_ENCODINGS`, or `SCALED_ENCODING`."""
    scale: "StoredTensor | None" = None
    """``[rows]`` what the rows are multiplied with; for `SCALED_ENCODING` only."""

    def read(self) -> npt.NDArray[np.float32]:
        """The values, ``[*shape]``, all finite.

        Raises:
            CheckpointError: the file ends early or cannot be read, or a value is NaN or infinite.
        """
        result = np.empty(prod(self.shape), np.float32)
        done = 0
        for block in self.blocks():
            result[done : done + block.size] = block
            done += block.size
        values = result.reshape(self.shape)
        if self.scale is not None:
            values *= self.scale.read()[:, None]
        return values

    def blocks(self) -> Iterator[npt.NDArray[np.floating[Any]]]:
        """The stored numbers in order, unscaled, some at a time; raises as `read` does."""
        left = prod(self.shape)
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                while left:
                    count = min(left, _VALUES_A_READ)
                    size = stored_bytes((count,), self.encoding)
                    raw = np.fromfile(file, np.uint8, size)
                    if raw.size != size:
                        raise CheckpointError(
                            f"{self.path.name}: the file ends inside tensor {self.name}; "
                            "get it again"
                        )
                    block = _decode(raw, self.encoding)
                    self._check_finite(block)
                    yield block
                    left -= count
        except OSError as error:
            raise CheckpointError(
                f"{self.path.name}: cannot read tensor {self.name}: {error.strerror}"
            ) from error

    def _check_finite(self, values: npt.NDArray[np.floating[Any]]) -> None:
        if not np.isfinite(values).all():
            found = "NaN" if np.isnan(values).any() else "an infinite value"
            raise CheckpointError(
                f"{self.path.name}: tensor {self.name} holds {found}; the checkpoint is damaged "
                "or its training diverged, use another one"
            )


def _decode(raw: npt.NDArray[np.uint8], encoding: str) -> npt.NDArray[np.floating[Any]]:
    """The numbers that some whole blocks stand for (little-endian, as every supported host)."""
    match encoding:
        case "I8":
            return raw.view(np.int8).astype(np.float32)
        case "F32":
            return raw.view(np.float32)
        case "F16":
            return raw.view(np.float16)
        case "BF16":  # the upper half of a float32
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, quants

    # One long row: the package loops in Python over groups of rows.
    values: npt.NDArray[np.float32] = quants.dequantize(
        raw.reshape(1, -1), GGMLQuantizationType[encoding]
    )
    return values.reshape(-1)


def have_equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers, however encoded; reads both, block by block.

    Raises:
        CheckpointError: one cannot be read, or has a value that is not finite.
    """
    if one == other:
        return True
    if one.shape != other.shape:
        return False
    if one.scale is not None or other.scale is not None:
        return np.array_equal(one.read(), other.read())
    blocks = zip(one.blocks(), other.blocks(), strict=True)
    return all(np.array_equal(first, second) for first, second in blocks)
