"""Writes an ONNX graph node by node, its tensors to disk at once (see `tensor_file`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from .tensor_file import TensorFile, unwritable

if TYPE_CHECKING:
    import onnx

Dimension = int | str

MICROSOFT = "com.microsoft"

_IR_VERSIONS = {21: 10, 23: 11}
"""Of the file format, by the opset it came with."""


@contextmanager
def new_graph(folder: Path, *, opset: int) -> "Iterator[GraphWriter]":
    """A `GraphWriter` of ``model.onnx`` with a data file of its own, ``model.onnx.data``.

    An error in the block removes both.
    """
    with (
        TensorFile(folder / "model.onnx.data") as tensors,
        GraphWriter(folder / "model.onnx", tensors, opset=opset) as graph,
    ):
        yield graph


class GraphWriter:
    """A graph under construction: ``with GraphWriter(path, tensors, opset=21) as graph: ...``.

    Leaving the block writes the model; leaving it with an error removes it. Names are the
    caller's; a duplicate is a `ValueError`.
    """

    def __init__(
        self, model_path: Path, tensors: TensorFile, *, opset: int, name: str = "decoder"
    ) -> None:
        """Begin a graph whose large tensors go to the open file `tensors` in its folder."""
        self.model_path = model_path
        self._file = tensors
        self._opset = opset
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}
        self._values: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._save()
        except OSError as failure:
            self.model_path.unlink(missing_ok=True)
            raise unwritable(self.model_path, failure) from failure
        if error is not None:
            self.model_path.unlink(missing_ok=True)

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
        self._tensors[self._new(name)] = self._file.add(name, value)
        return name

    def shared_tensor(self, name: str, make: Callable[[], npt.NDArray[Any]]) -> str:
        """Add a constant that the graphs of one file share: the first to ask makes it."""
        self._tensors[self._new(name)] = self._file.once(name, make)
        return name

    def stored_tensor(self, name: str, tensor: "onnx.TensorProto") -> str:
        """Add a constant that is in a file of the folder already; the same bytes, not a copy."""
        import onnx

        twin = onnx.TensorProto()
        twin.CopyFrom(tensor)
        twin.name = self._new(name)
        self._tensors[name] = twin
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

    def _save(self) -> None:
        from onnx import helper

        from omnidraft_npu import __version__

        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, list(self._tensors.values())
        )
        domains = {"", *(node.domain for node in self._nodes)}
        model = helper.make_model(
            graph,
            ir_version=_IR_VERSIONS[self._opset],
            opset_imports=[
                helper.make_opsetid(domain, 1 if domain else self._opset)
                for domain in sorted(domains)
            ],
            producer_name="omnidraft-npu",
            producer_version=__version__,
        )
        self.model_path.write_bytes(model.SerializeToString())


def _value_info(
    name: str, dtype: npt.DTypeLike, shape: Sequence[Dimension]
) -> "onnx.ValueInfoProto":
    from onnx import helper

    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape)
    )
