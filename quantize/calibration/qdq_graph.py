"""A float graph with every value in integers, as `QuantizeLinear`/`DequantizeLinear` say it.

A value keeps its name; what its operator gives is called `{name}.raw`, the integers
`{name}.q`. The cache is integers on the outside too: its inputs and outputs keep their names,
and the float values inside are called `{name}.float`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph_writer import GraphWriter
from ..scale_search import BLOCK, IntegerWeight
from .encodings import (
    Encoding,
    is_attention,
    is_cache_input,
    is_cache_output,
    is_lora,
    is_residual,
    raw,
)
from .weights import IntegerWeights

if TYPE_CHECKING:
    import onnx

Constants = Callable[[str], Any]
"""A constant of the float graph by name."""


class QdqGraph:
    """The quantised graph of one length; `build` adds it."""

    def __init__(
        self,
        graph: GraphWriter,
        source: "onnx.GraphProto",
        encodings: Mapping[str, Encoding],
        weights: IntegerWeights,
        constants: Constants,
        *,
        has_rotary_operator: bool,
    ) -> None:
        self._graph = graph
        self._has_rotary_operator = has_rotary_operator
        self._source = source
        self._encodings = encodings
        self._weights = weights
        self._constants = constants
        self._tensors = {tensor.name: tensor for tensor in source.initializer}
        activations = {name for node in source.node for name in node.output}
        activations |= {v.name for v in source.input if value_type(v)[0] == np.float32}
        self._kept = activations - encodings.keys()
        """Activations that stay in floating point."""
        may_stay = (is_lora, is_residual, is_attention)
        if unknown := {name for name in self._kept if not any(may(name) for may in may_stay)}:
            raise ValueError(f"{', '.join(sorted(unknown))} was not calibrated")
        self._floats: dict[str, str] = {}
        """Values whose name is that of their integers, and what the floats are called."""

    def build(self) -> None:
        """Add inputs, nodes, tensors and outputs."""
        for value in self._source.input:
            self._input(value)
        for node in self._source.node:
            self._node(node)
        for value in self._source.output:
            dtype, shape = value_type(value)
            if is_cache_output(value.name):
                dtype = self._encodings[value.name].dtype
            self._graph.output(value.name, dtype, shape)

    def _input(self, value: "onnx.ValueInfoProto") -> None:
        name = value.name
        dtype, shape = value_type(value)
        encoding = self._encodings.get(name)
        if encoding is None:
            self._graph.input(name, dtype, shape)
        elif is_cache_input(name):
            self._graph.input(name, encoding.dtype, shape)
            self._floats[name] = self._dequantize(name, encoding, f"{name}.float")
        else:
            self._graph.input(name, dtype, shape)
            integers = self._quantize(name, encoding, f"{name}.q")
            self._floats[name] = self._dequantize(integers, encoding, f"{name}.float")

    def _node(self, node: "onnx.NodeProto") -> None:
        from onnx import helper

        (output,) = node.output
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        weight = self._weight_of(node)
        reads_floats = not self._kept.isdisjoint(node.input)
        inputs = [
            self._constant(name, reads_floats, weight, node.op_type)
            if name in self._tensors
            else self._floats.get(name, name)
            for name in node.input
        ]
        if node.op_type == "RotaryEmbedding" and not self._has_rotary_operator:
            self._rotate_halves(node, inputs)
        elif output in self._kept:
            self._graph.node(node.op_type, inputs, output, **attributes)
            return
        else:
            self._graph.node(node.op_type, inputs, raw(output), **attributes)
        if is_cache_output(output):
            self._cache_output(output)
        else:
            self._requantize(output, self._encodings[output])

    def _rotate_halves(self, node: "onnx.NodeProto", inputs: Sequence[str]) -> None:
        """`RotaryEmbedding` in products and sums: the halves a, b of a head become
        ``a cos - b sin`` and ``b cos + a sin``."""
        (output,) = node.output
        x, tables = inputs[0], dict(zip(("cos", "sin"), inputs[1:], strict=True))
        encoding = self._encodings[node.input[0]]
        product = encoding.times(*(self._encodings[name] for name in node.input[1:]))
        made = self._encodings[raw(output) if is_cache_output(output) else output]
        halves = [f"{output}.a", f"{output}.b"]
        self._graph.node("Split", [x], [raw(half) for half in halves], axis=-1, num_outputs=2)
        for half in halves:
            self._requantize(half, encoding)
            for name, table in tables.items():
                self._graph.node("Mul", [half, table], raw(f"{half}.{name}"))
                self._requantize(f"{half}.{name}", product)
        a, b = halves
        turned = [f"{output}.low", f"{output}.high"]
        self._graph.node("Sub", [f"{a}.cos", f"{b}.sin"], raw(turned[0]))
        self._graph.node("Add", [f"{b}.cos", f"{a}.sin"], raw(turned[1]))
        for half in turned:
            self._requantize(half, made)
        self._graph.node("Concat", turned, raw(output), axis=-1)

    def _weight_of(self, node: "onnx.NodeProto") -> IntegerWeight | None:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in self._tensors:
            return None
        return self._weights.get(node.input[1].removesuffix(".weight"))

    def _cache_output(self, name: str) -> None:
        made, kept = self._encodings[raw(name)], self._encodings[name]
        value = raw(name)
        if made != kept:
            integers = self._quantize(value, made, f"{value}.q")
            value = self._dequantize(integers, made, f"{value}.float")
        self._quantize(value, kept, name)
        self._floats[name] = self._dequantize(name, kept, f"{name}.float")

    def _constant(self, name: str, is_kept: bool, weight: IntegerWeight | None, op: str) -> str:
        """A constant as a node reads it; it is added when first read.

        A weight has its own levels; another float constant 16 bits, in the encoding of what is
        looked up in it if anything is. Beside a float activation it stays as it is.
        """
        if is_kept or not _is_float(self._tensors[name]):
            if not self._graph.has(name):
                self._graph.shared_tensor(name, lambda: self._constants(name))
            return name
        if self._graph.has(f"{name}.float"):
            return f"{name}.float"
        if weight is not None:
            self._weight(name, weight, out_axis=1 if op == "MatMul" else 0)
            return f"{name}.float"
        encoding = self._encodings.get(name)
        if encoding is None:
            values = self._constants(name)
            encoding = Encoding.of_range(float(values.min()), float(values.max()), 16)
        levels = self._graph.shared_tensor(
            f"{name}.q", lambda: encoding.levels(self._constants(name))
        )
        return self._dequantize(levels, encoding, f"{name}.float")

    def _weight(self, name: str, weight: IntegerWeight, *, out_axis: int) -> None:
        """``[in, out]`` for MatMul, ``[out, in]`` for Gemm: outputs are along `out_axis`."""
        graph, scales = self._graph, weight.scales
        factor = scales.channel if len(scales.channel) > 1 else scales.channel[0]
        axis: dict[str, Any] = {"axis": out_axis} if factor.ndim else {}
        levels = graph.shared_tensor(f"{name}.q", lambda: _levels(weight, out_axis))
        scale = graph.shared_tensor(f"{name}.scale", lambda: factor)
        if scales.block is None:
            graph.node("DequantizeLinear", [levels, scale], f"{name}.float", **axis)
            return
        whole = scales.block.T if out_axis else scales.block
        blocks = graph.shared_tensor(f"{name}.blocks", lambda: np.ascontiguousarray(whole))
        steps = graph.node("DequantizeLinear", [blocks, scale], f"{name}.steps", **axis)
        inputs = [levels, steps, self._zeros(whole.shape)]
        along = 1 - out_axis
        graph.node("DequantizeLinear", inputs, f"{name}.float", axis=along, block_size=BLOCK)

    def _zeros(self, shape: tuple[int, ...]) -> str:
        """Zero points of blocks: all zero, but the HTP takes no block without one."""
        import ml_dtypes

        name = "zeros." + "x".join(map(str, shape))
        if not self._graph.has(name):
            self._graph.shared_tensor(name, lambda: np.zeros(shape, ml_dtypes.int4))
        return name

    def _requantize(self, name: str, encoding: Encoding) -> None:
        """`name` from what an operator gave, by way of integers."""
        integers = self._quantize(raw(name), encoding, f"{name}.q")
        self._dequantize(integers, encoding, name)

    def _quantize(self, value: str, encoding: Encoding, output: str) -> str:
        return self._graph.node("QuantizeLinear", [value, *self._scale(encoding)], output)

    def _dequantize(self, integers: str, encoding: Encoding, output: str) -> str:
        return self._graph.node("DequantizeLinear", [integers, *self._scale(encoding)], output)

    def _scale(self, encoding: Encoding) -> tuple[str, str]:
        scale, zero = f"scale.{encoding.scale!r}", f"zero.{encoding.bits}.{encoding.zero_point}"
        if not self._graph.has(scale):
            self._graph.tensor(scale, np.array(encoding.scale, np.float32))
        if not self._graph.has(zero):
            self._graph.tensor(zero, np.array(encoding.zero_point, encoding.dtype))
        return scale, zero


def _levels(weight: IntegerWeight, out_axis: int) -> Any:
    import ml_dtypes

    levels = np.ascontiguousarray(weight.levels.T) if out_axis else weight.levels
    return levels.astype(ml_dtypes.int4) if weight.bits == 4 else levels


def _is_float(tensor: "onnx.TensorProto") -> bool:
    return bool(tensor.data_type == 1)


def value_type(value: "onnx.ValueInfoProto") -> tuple[Any, list[int]]:
    """Type and shape of a graph's input or output."""
    from onnx import helper

    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    return helper.tensor_dtype_to_np_dtype(tensor.elem_type), shape


def constants_of(source: "onnx.GraphProto", folder: Path) -> Constants:
    """Reads the constants of a graph whose data file lies in `folder`, one at a time."""
    from onnx import numpy_helper

    tensors = {tensor.name: tensor for tensor in source.initializer}
    return lambda name: numpy_helper.to_array(tensors[name], str(folder))
