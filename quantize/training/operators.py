"""Operators of a training graph, each with what turns its gradient into that of its input."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph_writer import MICROSOFT, GraphWriter

Pullback = Callable[[str], str]
"""From the gradient of an output to that of the input; adds the nodes of it when called."""


class Operators:
    """Adds nodes to a graph under names of its own; values are given and taken by name."""

    def __init__(self, graph: GraphWriter) -> None:
        self.graph = graph
        self._count = 0

    def __call__(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output."""
        return self.graph.node(op, inputs, self._name(op), domain=domain, **attributes)

    def split(self, x: str, num_parts: int, axis: int) -> list[str]:
        """Equal parts of `x` along an axis."""
        if num_parts == 1:
            return [x]
        names = [self._name("Split") for _ in range(num_parts)]
        self.graph.node("Split", [x], names, axis=axis, num_outputs=num_parts)
        return names

    def split_widths(self, x: str, widths: Sequence[int]) -> list[str]:
        """Parts of the last axis of `x`."""
        if len(widths) == 1:
            return [x]
        names = [self._name("Split") for _ in widths]
        self.graph.node("Split", [x, self.integers(*widths)], names, axis=-1)
        return names

    def number(self, value: float) -> str:
        """A float constant, a scalar."""
        return self._constant(f"number.{value!r}", np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        """An int64 constant, a vector."""
        return self._constant(f"integers.{'_'.join(map(str, values))}", np.array(values, np.int64))

    def integer(self, value: int) -> str:
        """An int64 constant, a scalar."""
        return self._constant(f"integer.{value}", np.array(value, np.int64))

    def reshape(self, x: str, *shape: int) -> str:
        """`x` in another shape; 0 keeps the size of that axis, -1 is what is left."""
        return self("Reshape", x, self.integers(*shape))

    def matmul(
        self,
        x: str,
        y: str,
        *,
        transpose_x: bool = False,
        transpose_y: bool = False,
        scale: float = 1.0,
    ) -> str:
        """Product over the last two axes, without copies of what is transposed."""
        return self(
            "FusedMatMul",
            x,
            y,
            domain=MICROSOFT,
            transA=int(transpose_x),
            transB=int(transpose_y),
            alpha=scale,
        )

    def outer(self, x: str, y: str, widths: tuple[int, int]) -> str:
        """``x.T @ y`` summed over all axes but the last, whose `widths` are the result's shape."""
        flat = [self.reshape(value, -1, n) for value, n in zip((x, y), widths, strict=True)]
        return self("Gemm", *flat, transA=1)

    def sum(self, x: str, *axes: int, keep: bool = False) -> str:
        """Sum over `axes`, or over all of them."""
        inputs = [x, self.integers(*axes)] if axes else [x]
        return self("ReduceSum", *inputs, keepdims=int(keep))

    def norm(self, x: str, weight: str, epsilon: float) -> tuple[str, Pullback]:
        """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last axis."""
        y = self("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=epsilon)

        def pull(gradient: str) -> str:
            square = self("ReduceMean", self("Mul", x, x), self.integers(-1))
            size = self("Sqrt", self("Add", square, self.number(epsilon)))
            normed, weighted = self("Div", x, size), self("Mul", gradient, weight)
            along = self("ReduceMean", self("Mul", normed, weighted), self.integers(-1))
            return self("Div", self("Sub", weighted, self("Mul", normed, along)), size)

        return y, pull

    def softmax(self, x: str) -> tuple[str, Pullback]:
        """Softmax over the last axis."""
        y = self("Softmax", x, axis=-1)

        def pull(gradient: str) -> str:
            along = self.sum(self("Mul", gradient, y), -1, keep=True)
            return self("Mul", y, self("Sub", gradient, along))

        return y, pull

    def silu(self, x: str) -> tuple[str, Pullback]:
        """``x * sigmoid(x)``."""
        y = self("QuickGelu", x, domain=MICROSOFT, alpha=1.0)

        def pull(gradient: str) -> str:
            gate = self("Sigmoid", x)
            rest = self("Sub", self.number(1.0), gate)
            return self("Mul", gradient, self("Add", gate, self("Mul", y, rest)))

        return y, pull

    def gelu_tanh(self, x: str) -> tuple[str, Pullback]:
        """``x * (1 + t) / 2`` with ``t = tanh(sqrt(2 / pi) * (x + 0.044715 x^3))``."""
        y = self("Gelu", x, approximate="tanh")

        def pull(gradient: str) -> str:
            slope, cubic = float(np.sqrt(2 / np.pi)), 0.044715
            square = self("Mul", x, x)
            inner = self("Add", self("Mul", square, self.number(cubic)), self.number(1.0))
            t = self("Tanh", self("Mul", self("Mul", x, inner), self.number(slope)))
            inner_slope = self(
                "Add",
                self("Mul", square, self.number(3 * cubic * slope / 2)),
                self.number(slope / 2),
            )
            bend = self("Sub", self.number(1.0), self("Mul", t, t))
            half = self("Mul", self("Add", t, self.number(1.0)), self.number(0.5))
            steep = self("Mul", self("Mul", x, bend), inner_slope)
            return self("Mul", gradient, self("Add", half, steep))

        return y, pull

    def _constant(self, name: str, value: npt.NDArray[Any]) -> str:
        from onnx import numpy_helper

        if self.graph.has(name):
            return name
        return self.graph.stored_tensor(name, numpy_helper.from_array(value))

    def _name(self, op: str) -> str:
        self._count += 1
        return f"{op}.{self._count}"
