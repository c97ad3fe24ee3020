"""A file of tensors that one graph or several refer to, written as the tensors come.

A graph's protobuf holds names, shapes and offsets only, so a model of any size is built in
the memory of its largest tensor, and the 2 GiB limit of protobuf never matters.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ExportError

if TYPE_CHECKING:
    import onnx

EXTERNAL_BYTES = 1024
"""Tensors of at least this size go to the file; smaller ones stay in the protobuf."""
ALIGNMENT = 4096
"""Offsets in the file are multiples of a memory page, so that it can be mapped."""


class TensorFile:
    """A data file under construction: ``with TensorFile(path) as tensors: ...``.

    Leaving the block with an error removes the file. What it gives are the `TensorProto`s
    for the graphs of the same folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: BinaryIO | None = None
        self._shared: dict[str, onnx.TensorProto] = {}

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._data = self.path.open("wb")
        except OSError as error:
            raise unwritable(self.path, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._data is not None:
                self._data.close()
        except OSError as failure:
            self.path.unlink(missing_ok=True)
            raise unwritable(self.path, failure) from failure
        if error is not None:
            self.path.unlink(missing_ok=True)

    def add(self, name: str, value: npt.NDArray[Any]) -> "onnx.TensorProto":
        """A constant; a large one is on disk when this returns, and nowhere else.

        4-bit integers are two to a byte there, the first one low.
        """
        import onnx
        from onnx import helper, numpy_helper

        data = _packed(value) if value.dtype.name == "int4" else value
        if value.nbytes < EXTERNAL_BYTES:
            return numpy_helper.from_array(np.ascontiguousarray(value), name)
        fields = {
            "location": self.path.name,
            "offset": self._append(data),
            "length": data.nbytes,
        }
        return onnx.TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
            dims=value.shape,
            data_location=onnx.TensorProto.EXTERNAL,
            external_data=_entries(fields),
        )

    def once(self, name: str, make: Callable[[], npt.NDArray[Any]]) -> "onnx.TensorProto":
        """`add` what `make` gives, for the first graph that asks; the others get the same."""
        if name not in self._shared:
            self._shared[name] = self.add(name, make())
        return self._shared[name]

    def _append(self, value: npt.NDArray[Any]) -> int:
        if self._data is None:
            raise ValueError("a TensorFile is used in a with block")
        try:
            self._data.write(b"\0" * (-self._data.tell() % ALIGNMENT))
            offset = self._data.tell()
            self._data.write(np.ascontiguousarray(value).data)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return offset


def unwritable(path: Path, error: OSError) -> ExportError:
    """What to tell the user of a file that could not be written."""
    reason = error.strerror or error
    return ExportError(
        f"cannot write {path}: {reason}. Free some space or choose another folder with -o"
    )


def _packed(levels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """4-bit integers two to a byte; an odd one out is paired with 0."""
    flat = levels.reshape(-1).view(np.uint8) & np.uint8(15)
    low, high = flat[0::2], np.append(flat[1::2], np.zeros(len(flat) % 2, np.uint8))
    return low | high << np.uint8(4)


def _entries(fields: Mapping[str, object]) -> "list[onnx.StringStringEntryProto]":
    import onnx

    return [onnx.StringStringEntryProto(key=key, value=str(value)) for key, value in fields.items()]
