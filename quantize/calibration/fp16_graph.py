"""A float graph with every value rounded to fp16, to see on a CPU what the HTP's fp16 loses.

The products themselves stay exact: the HTP adds up in more than 16 bits too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def write_fp16_graph(source: Path, path: Path) -> None:
    """Write the graph at `source` with its weights and every result of a node rounded.

    Args:
        source: A float graph of the HTP contract.
        path: In the same folder, as both read one data file; names of values stay.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    graph = model.graph
    floats = _float_values(model)
    weights = {tensor.name for tensor in graph.initializer} & floats
    nodes: list[onnx.NodeProto] = []
    rounded: dict[str, str] = {}
    for node in graph.node:
        for i, name in enumerate(node.input):
            # The rows that are taken of a table are rounded, not the whole table.
            if name in weights and not (node.op_type == "Gather" and i == 0):
                if name not in rounded:
                    rounded[name] = f"{name}.rounded"
                    nodes += _rounding(name, rounded[name])
                node.input[i] = rounded[name]
        nodes.append(node)
        for i, name in enumerate(node.output):
            if name in floats:
                node.output[i] = f"{name}.exact"
                nodes += _rounding(f"{name}.exact", name)
    del graph.node[:]
    graph.node.extend(nodes)
    path.write_bytes(model.SerializeToString())


def _float_values(model: "onnx.ModelProto") -> set[str]:
    """Names of all float32 constants and results."""
    import onnx

    kind = onnx.TensorProto.FLOAT
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = [*graph.value_info, *graph.output]
    found = {value.name for value in values if value.type.tensor_type.elem_type == kind}
    return found | {tensor.name for tensor in graph.initializer if tensor.data_type == kind}


def _rounding(name: str, rounded: str) -> "list[onnx.NodeProto]":
    from onnx import TensorProto, helper

    half = f"{name}.half"
    return [
        helper.make_node("Cast", [name], [half], f"{half}.cast", to=TensorProto.FLOAT16),
        helper.make_node("Cast", [half], [rounded], f"{rounded}.cast", to=TensorProto.FLOAT),
    ]
