"""Where a graph's outputs land: buffers that are allocated once and bound by reference."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort


class OutputRows:
    """An output buffer ``[1, rows, width]`` that grows when a run needs more rows."""

    def __init__(self, name: str, width: int, dtype: np.dtype[Any]) -> None:
        self._name = name
        self._buffer: npt.NDArray[Any] = np.empty((16, width), dtype)

    def reserve(self, rows: int) -> None:
        """Make room for so many rows; what the buffer held is lost if it must grow."""
        if rows > len(self._buffer):
            self._buffer = np.empty((rows, self._buffer.shape[1]), self._buffer.dtype)

    def view(self, rows: int) -> npt.NDArray[Any]:
        """The first `rows` rows."""
        return self._buffer[:rows]

    def drop(self, row: int, dropped: int, kept: int) -> None:
        """Move `kept` rows up to `row`, over the `dropped` ones before them."""
        self._buffer[row : row + kept] = self._buffer[row + dropped : row + dropped + kept]

    def bind(self, binding: ort.IOBinding, row: int, rows: int) -> None:
        """Let the next run write `rows` rows from `row` on."""
        value = ort.OrtValue.ortvalue_from_numpy(self._buffer[row : row + rows][None])
        binding.bind_ortvalue_output(self._name, value)
