"""Writes an ONNX graph node by node, its tensors to disk at once.

The protobuf holds names, shapes and offsets only, so a model of any size is built in
the memory of its largest tensor, and the 2 GiB limit of protobuf never matters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ExportError

if TYPE_CHECKING:
    import onnx

Dimension = int | str

EXTERNAL_BYTES = 1024
"""Tensors of at least this size go to the data file; smaller ones stay in the protobuf."""
ALIGNMENT = 4096
"""Offsets in the data file are multiples of a memory page, so that it can be mapped."""
MICROSOFT = "com.microsoft"

_IR_VERSION = 10


class GraphWriter:
    """A graph under construction: ``with GraphWriter(folder, opset=21) as graph: ...``.

    Leaving the block writes ``model.onnx`` beside ``model.onnx.data``; leaving it with an
    error removes both. Names are the caller's; a duplicate is a `ValueError`.
    """

    def __init__(self, folder: Path, *, opset: int, name: str = "decoder") -> None:
        self.model_path = folder / "model.onnx"
        self.data_path = folder / "model.onnx.data"
        self._opset = opset
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}
        self._values: set[str] = set()
        self._data: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self.data_path.parent.mkdir(parents=True, exist_ok=True)
            self._data = self.data_path.open("wb")
        except OSError as error:
            raise _unwritable(self.data_path, error) from error
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
            if error is None:
                self._save()
        except OSError as failure:
            self._remove()
            raise _unwritable(self.model_path, failure) from failure
        if error is not None:
            self._remove()

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[Dimension]) -> str:
        """Declare a graph input; a string in `shape` is a symbolic dimension."""
        self._inputs.append(_value_info(self._new(name), dtype, shape))
        return name

    def optional_input(self, name: str, default: npt.NDArray[Any]) -> str:
        """Declare an input that has `default` where the caller does not feed it."""
        self._inputs.append(_value_info(name, default.dtype, default.shape))
        return self.tensor(name, default)

    def output(self, name: str, dtype: npt.DTypeLike, shape: Sequence[Dimension]) -> str:
        """Declare a value that a node already gives as a graph output."""
        if name not in self._values:
            raise ValueError(f"output {name!r} is no value of the graph")
        self._outputs.append(_value_info(name, dtype, shape))
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        output: str | Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node and give the name of its first output.

        Args:
            op: operator type.
            inputs: names of values; an empty one is an input left out.
            output: name or names of what it gives; an empty one is not asked for.
            domain: of the operator; empty for standard ONNX.
            attributes: as `onnx.helper.make_node` takes them.
        """
        from onnx import helper

        outputs = [output] if isinstance(output, str) else list(output)
        for name in inputs:
            if name and name not in self._values:
                raise ValueError(f"{op} {outputs[0]!r} reads {name!r}, which is no value yet")
        for name in filter(None, outputs):
            self._new(name)
        node = helper.make_node(
            op, list(inputs), outputs, name=f"{outputs[0]}/{op}", domain=domain, **attributes
        )
        self._nodes.append(node)
        return outputs[0]

    def tensor(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add a constant; a large one is on disk when this returns, and nowhere else."""
        import onnx
        from onnx import helper, numpy_helper

        self._new(name)
        if value.nbytes < EXTERNAL_BYTES:
            self._tensors[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
            return name
        offset = self._append(value)
        self._tensors[name] = onnx.TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
            dims=value.shape,
            data_location=onnx.TensorProto.EXTERNAL,
            external_data=_entries(
                {"location": self.data_path.name, "offset": offset, "length": value.nbytes}
            ),
        )
        return name

    def has(self, name: str) -> bool:
        """Whether the graph already holds a value of this name."""
        return name in self._values

    def view(self, name: str, of: str, shape: Sequence[int]) -> str:
        """Add a constant that is another one's bytes in another shape, stored once."""
        import onnx

        source = self._tensors[of]
        if np.prod(shape) != np.prod(source.dims):
            raise ValueError(f"{of!r} is {tuple(source.dims)}, cannot be seen as {tuple(shape)}")
        twin = onnx.TensorProto()
        twin.CopyFrom(source)
        twin.name = self._new(name)
        del twin.dims[:]
        twin.dims.extend(shape)
        self._tensors[name] = twin
        return name

    def _new(self, name: str) -> str:
        if name in self._values:
            raise ValueError(f"the graph already has a value {name!r}")
        self._values.add(name)
        return name

    def _append(self, value: npt.NDArray[Any]) -> int:
        if self._data is None:
            raise ValueError("a GraphWriter is used in a with block")
        try:
            self._data.write(b"\0" * (-self._data.tell() % ALIGNMENT))
            offset = self._data.tell()
            self._data.write(np.ascontiguousarray(value).data)
        except OSError as error:
            raise _unwritable(self.data_path, error) from error
        return offset

    def _save(self) -> None:
        from onnx import helper

        from omnidraft_npu import __version__

        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, list(self._tensors.values())
        )
        domains = {"", *(node.domain for node in self._nodes)}
        model = helper.make_model(
            graph,
            ir_version=_IR_VERSION,
            opset_imports=[
                helper.make_opsetid(domain, 1 if domain else self._opset)
                for domain in sorted(domains)
            ],
            producer_name="omnidraft-npu",
            producer_version=__version__,
        )
        self.model_path.write_bytes(model.SerializeToString())

    def _remove(self) -> None:
        self.model_path.unlink(missing_ok=True)
        self.data_path.unlink(missing_ok=True)


def _value_info(
    name: str, dtype: npt.DTypeLike, shape: Sequence[Dimension]
) -> "onnx.ValueInfoProto":
    from onnx import helper

    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape)
    )


def _entries(fields: Mapping[str, object]) -> "list[onnx.StringStringEntryProto]":
    import onnx

    return [onnx.StringStringEntryProto(key=key, value=str(value)) for key, value in fields.items()]


def _unwritable(path: Path, error: OSError) -> ExportError:
    reason = error.strerror or error
    return ExportError(
        f"cannot write {path}: {reason}. Free some space or choose another folder with -o"
    )
