"""Weights of the CPU flavour: the same projection in float32, 8 or 4 bits."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from .graph_writer import MICROSOFT, GraphWriter
from .weight_quantization import BLOCK, Bits, BlockQuantized, quantize_blocks

Precision = Literal["fp32", "int8", "int4"]
Floats = npt.NDArray[np.float32]

_INT8_ACTIVATIONS = 4
"""`accuracy_level`: activations are rounded to 8 bits a block; several times faster."""


class CpuWeights:
    """Puts projections and the embedding into a graph, in one precision."""

    def __init__(self, graph: GraphWriter, bits: Bits | None, head_bits: Bits | None) -> None:
        """Args: bits and head_bits are those of a weight and of the head; None is float32."""
        self._graph = graph
        self._bits = bits
        self._head_bits = head_bits
        self._in_features: dict[str, int] = {}

    def project(self, x: str, weight: Floats, name: str, bias: Floats | None = None) -> str:
        """``x @ weight.T + bias``; the value is called `name`."""
        self._store(name, weight, self._bits)
        return self._multiply(x, name, self._bits, weight.shape[0], name, bias)

    def embed(self, ids: str, weight: Floats, name: str) -> str:
        """Rows of the embedding, which a tied head may use again; the value is called `name`."""
        self._store(name, weight, self._head_bits)
        if self._head_bits is None:
            return self._graph.node("Gather", [f"{name}.weight", ids], name)
        blocks = -(-weight.shape[1] // BLOCK)
        flat = self._graph.view(
            f"{name}.rows", f"{name}.weight", [len(weight), blocks * BLOCK * self._head_bits // 8]
        )
        rows = self._graph.node(
            "GatherBlockQuantized",
            [flat, ids, f"{name}.scales", *self._zero_points(name)],
            name if weight.shape[1] % BLOCK == 0 else f"{name}.padded",
            domain=MICROSOFT,
            bits=self._head_bits,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        return rows if rows == name else self._cut(rows, weight.shape[1], name)

    def head(self, x: str, weight: Floats | None, num_logits: int, name: str, tied: str) -> str:
        """Logits; with `weight` None from the embedding that was stored as `tied`."""
        source = tied
        if weight is not None:
            source = f"{name}.head"
            self._store(source, weight, self._head_bits)
        return self._multiply(x, source, self._head_bits, num_logits, name, None)

    def _store(self, name: str, weight: Floats, bits: Bits | None) -> None:
        self._in_features[name] = weight.shape[1]
        if bits is None:
            self._graph.tensor(f"{name}.weight", weight)
            return
        quantized: BlockQuantized = quantize_blocks(weight, bits)
        self._graph.tensor(f"{name}.weight", quantized.packed)
        self._graph.tensor(f"{name}.scales", quantized.scales)
        if quantized.zero_points is not None:
            self._graph.tensor(f"{name}.zero_points", quantized.zero_points)

    def _multiply(
        self, x: str, source: str, bits: Bits | None, out: int, name: str, bias: Floats | None
    ) -> str:
        biases = [] if bias is None else [self._graph.tensor(f"{name}.bias", bias)]
        if bits is None:
            product = f"{name}.product" if biases else name
            self._graph.node(
                "FusedMatMul", [x, f"{source}.weight"], product, domain=MICROSOFT, transB=1
            )
            return self._graph.node("Add", [product, *biases], name) if biases else product
        inputs = [x, f"{source}.weight", f"{source}.scales", *self._zero_points(source)]
        if biases:
            inputs += [""] * (5 - len(inputs)) + biases
        return self._graph.node(
            "MatMulNBits",
            inputs,
            name,
            domain=MICROSOFT,
            K=self._in_features[source],
            N=out,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _zero_points(self, source: str) -> list[str]:
        name = f"{source}.zero_points"
        return [name] if self._graph.has(name) else []

    def _cut(self, rows: str, width: int, name: str) -> str:
        bounds = [
            self._graph.tensor(f"{name}.{key}", np.array([value], np.int64))
            for key, value in (("start", 0), ("end", width), ("axis", 2))
        ]
        return self._graph.node("Slice", [rows, *bounds], name)
