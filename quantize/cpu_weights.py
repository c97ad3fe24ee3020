"""Weights of the CPU flavour: the same projection in float32, 8 or 4 bits."""

import numpy as np
import numpy.typing as npt

from omnidraft_npu.precision import Precision

from .graph_writer import MICROSOFT, GraphWriter
from .weight_quantization import BLOCK, Bits, quantize_blocks

Floats = npt.NDArray[np.float32]

_BITS: dict[Precision, Bits | None] = {"fp32": None, "int8": 8, "int4": 4}
_EIGHT_BIT = ("embed_tokens", "logits", "qkv")
"""Last part of the names that keep 8 bits in an int4 graph: small, and they cost most of the
agreement with float32 (benchmarks/README.md)."""

_INT8_ACTIVATIONS = 4
"""`accuracy_level`: activations are rounded to 8 bits a block; several times faster."""


class CpuWeights:
    """Puts projections and the embedding into a graph, in one precision."""

    def __init__(self, graph: GraphWriter, precision: Precision) -> None:
        self._graph = graph
        self._precision = precision
        self._stored: dict[str, tuple[Bits | None, int]] = {}

    @property
    def wants_input_sizes(self) -> bool:
        """Whether `project` makes use of the sizes of its input."""
        return self._precision == "int4"

    def project(
        self, x: str, name: str, weight: Floats, bias: Floats | None, input_sizes: Floats | None
    ) -> str:
        """``x @ weight.T + bias``; the value is called `name`.

        Args:
            x: ``[batch, length, in]``
            name: of the result and, with a suffix, of the tensors.
            weight: ``[out, in]``
            bias: ``[out]``
            input_sizes: ``[in]`` mean squares of x.
        """
        self._store(name, weight, input_sizes)
        return self._multiply(x, name, weight.shape[0], name, bias)

    def embed(self, ids: str, weight: Floats, name: str) -> str:
        """Rows of the embedding, which a tied head may use again; the value is called `name`."""
        self._store(name, weight, None)
        bits, in_features = self._stored[name]
        if bits is None:
            return self._graph.node("Gather", [f"{name}.weight", ids], name)
        padded = -(-in_features // BLOCK) * BLOCK
        rows = self._graph.view(f"{name}.rows", f"{name}.weight", [len(weight), padded * bits // 8])
        embedded = self._graph.node(
            "GatherBlockQuantized",
            [rows, ids, f"{name}.scales", f"{name}.zero_points"],
            name if in_features == padded else f"{name}.padded",
            domain=MICROSOFT,
            bits=bits,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        return embedded if embedded == name else self._cut(embedded, in_features, name)

    def head(self, x: str, name: str, weight: Floats | None, num_logits: int, tied: str) -> str:
        """Logits; with `weight` None from the embedding that was stored as `tied`."""
        if weight is None:
            return self._multiply(x, tied, num_logits, name, None)
        return self.project(x, name, weight, None, None)

    def _store(self, name: str, weight: Floats, input_sizes: Floats | None) -> None:
        bits = _BITS[self._precision]
        if bits is not None and name.split(".")[-1] in _EIGHT_BIT:
            bits = 8
        self._stored[name] = (bits, weight.shape[1])
        if bits is None:
            self._graph.tensor(f"{name}.weight", weight)
            return
        quantized = quantize_blocks(weight, bits, importance=input_sizes)
        self._graph.tensor(f"{name}.weight", quantized.packed)
        self._graph.tensor(f"{name}.scales", quantized.scales)
        self._graph.tensor(f"{name}.zero_points", quantized.zero_points)

    def _multiply(self, x: str, source: str, out: int, name: str, bias: Floats | None) -> str:
        graph = self._graph
        bits, in_features = self._stored[source]
        biases = [] if bias is None else [graph.tensor(f"{name}.bias", bias)]
        if bits is None:
            product = f"{name}.product" if biases else name
            graph.node("FusedMatMul", [x, f"{source}.weight"], product, domain=MICROSOFT, transB=1)
            return graph.node("Add", [product, *biases], name) if biases else product
        tensors = [f"{source}.{part}" for part in ("weight", "scales", "zero_points")]
        return graph.node(
            "MatMulNBits",
            [x, *tensors, *(["", *biases] if biases else [])],
            name,
            domain=MICROSOFT,
            K=in_features,
            N=out,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _cut(self, rows: str, width: int, name: str) -> str:
        bounds = [
            self._graph.tensor(f"{name}.{key}", np.array([value], np.int64))
            for key, value in (("start", 0), ("end", width), ("axis", 2))
        ]
        return self._graph.node("Slice", [rows, *bounds], name)
