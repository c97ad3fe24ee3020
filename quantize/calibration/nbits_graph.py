"""A float graph with its weights as MatMulNBits has them: blocks of integers, fp16 products.

No activation is rounded to integers, so no ranges are needed.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..graph_writer import MICROSOFT, GraphWriter
from ..scale_search import BLOCK, IntegerWeight
from .qdq_graph import Constants, value_type
from .weights import IntegerWeights

if TYPE_CHECKING:
    import onnx


def build_nbits_graph(
    graph: GraphWriter,
    source: "onnx.GraphProto",
    weights: IntegerWeights,
    constants: Constants,
) -> None:
    """Add `source` with every product whose weight is among `weights` replaced.

    Args:
        graph: An open writer.
        source: A float graph of the HTP contract.
        weights: Of the projections and the head.
        constants: Gives a constant of the source by name.
    """
    from onnx import helper

    names = {tensor.name for tensor in source.initializer}
    for value in source.input:
        graph.input(value.name, *value_type(value))
    for node in source.node:
        weight = None
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in names:
            weight = weights.get(node.input[1].removesuffix(".weight"))
        if weight is not None:
            x = node.input[0] if node.op_type == "MatMul" else _as_batch(graph, node.input[0])
            _product(graph, x, node.input[1], weight, node.output[0])
            continue
        for name in names.intersection(node.input):
            if not graph.has(name):
                graph.shared_tensor(name, partial(constants, name))
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        graph.node(node.op_type, node.input, list(node.output), **attributes)
    for value in source.output:
        graph.output(value.name, *value_type(value))


def _as_batch(graph: GraphWriter, rows: str) -> str:
    """``[1, S, in]`` of the head's ``[S, in]``, which the HTP's MatMulNBits does not take."""
    graph.tensor("axis.batch", np.array([0], np.int64))
    return graph.node("Unsqueeze", [rows, "axis.batch"], f"{rows}.batch")


def _product(graph: GraphWriter, x: str, name: str, weight: IntegerWeight, output: str) -> None:
    out, in_features = weight.levels.shape
    blocks = -(-in_features // BLOCK)
    scales = weight.scales.by_block(out, blocks)
    operands = [
        graph.shared_tensor(f"{name}.q", lambda: pack(weight)),
        graph.shared_tensor(f"{name}.scales", lambda: scales.reshape(-1)),
    ]
    graph.node(
        "MatMulNBits",
        [x, *operands],
        output,
        domain=MICROSOFT,
        K=in_features,
        N=out,
        bits=weight.bits,
        block_size=BLOCK,
    )


def pack(weight: IntegerWeight) -> npt.NDArray[np.uint8]:
    """``[out, blocks, BLOCK * bits / 8]`` levels from 0, zero in the middle; the first is low."""
    out, in_features = weight.levels.shape
    middle = 1 << (weight.bits - 1)
    padded = np.pad(weight.levels, ((0, 0), (0, -in_features % BLOCK)))
    shifted = (padded.astype(np.int16) + middle).astype(np.uint8)
    levels: npt.NDArray[np.uint8] = shifted.reshape(out, -1, BLOCK)
    if weight.bits == 8:
        return levels
    high: npt.NDArray[np.uint8] = np.left_shift(levels[..., 1::2], 4, dtype=np.uint8)
    return levels[..., 0::2] | high
