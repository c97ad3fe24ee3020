"""Heads of any even size for an attention operator that takes multiples of 16 only.

Each half of a head is padded with zeros, since the operator rotates channel i with channel
``i + size / 2``. The zeros add nothing to the scores, whose scale stays that of the real size,
and the same places are cut from the result.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .graph_writer import GraphWriter

_MULTIPLE = 16


def padded_head_dim(head_dim: int) -> int:
    """Channels of a head in the operator and in the cache."""
    return -(-head_dim // _MULTIPLE) * _MULTIPLE


class HeadPadding:
    """Nodes that bring heads to the operator's size and back; none where the sizes are equal."""

    def __init__(self, graph: GraphWriter, head_dim: int) -> None:
        self._graph = graph
        self._half = head_dim // 2
        self._padded_half = padded_head_dim(head_dim) // 2

    @property
    def is_needed(self) -> bool:
        """Whether the operator takes another size than the model has."""
        return self._half != self._padded_half

    def table(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A rotary table ``[length, head_dim / 2]`` with columns for the zeros."""
        return np.pad(values, ((0, 0), (0, self._padded_half - self._half)))

    def pad(self, inputs: Sequence[str], name: str) -> list[str]:
        """Values ``[batch, length, heads * head_dim]`` with zeros in each head; "" stays."""
        if not self.is_needed:
            return list(inputs)
        return [
            self._with_halves(x, f"{name}.{i}", self._half, self._add_zeros) if x else x
            for i, x in enumerate(inputs)
        ]

    def cut(self, attended: str) -> str:
        """The result without the channels that `pad` added."""
        if not self.is_needed:
            return attended
        return self._with_halves(attended, attended, self._padded_half, self._drop_zeros)

    def _with_halves(self, x: str, name: str, size: int, change: Callable[[str], str]) -> str:
        """`change` applied to ``[batch, length, halves, size]``."""
        apart = self._shared(f"halves.{size}", [0, 0, -1, size])
        halves = self._graph.node("Reshape", [x, apart], f"{name}.halves")
        merged = self._shared("merged", [0, 0, -1])
        return self._graph.node("Reshape", [change(halves), merged], f"{name}.resized")

    def _add_zeros(self, halves: str) -> str:
        pads = self._shared("halves.pads", [0] * 7 + [self._padded_half - self._half])
        return self._graph.node("Pad", [halves, pads], f"{halves}.padded")

    def _drop_zeros(self, halves: str) -> str:
        bounds = [
            self._shared(f"halves.{key}", [value])
            for key, value in (("start", 0), ("end", self._half), ("axis", 3))
        ]
        return self._graph.node("Slice", [halves, *bounds], f"{halves}.cut")

    def _shared(self, name: str, values: list[int]) -> str:
        if not self._graph.has(name):
            self._graph.tensor(name, np.array(values, np.int64))
        return name
