"""The smallest and largest value of every activation of a float graph, over calibration text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .static_graph import Array, StaticGraph, open_beside

Ranges = dict[str, tuple[float, float]]


def collect_ranges(
    path: Path,
    windows: Array,
    *,
    sliding_window: int | None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Ranges, Array]:
    """Run the graph in its deployed shape, its cache filling up as it will, and watch.

    Args:
        path: A float graph of the HTP contract.
        windows: ``[n, length]`` token ids, the length a multiple of the graph's and within its
            context; of a later part of a model what this gave for the part before.
        sliding_window: see `StaticGraph`.
        tell: Told the windows done and their total.

    Returns:
        By value: the masks', the residual stream's where the part takes it, and everything a
        node gives. The cache has the range of the rows that go into it. And the rows ``[n,
        length, hidden]`` that the part gives to the next; none if it is the last.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    names = [name for node in model.graph.node for name in node.output]
    for name in names:
        _watch(model.graph, name, "ReduceMin", "lowest")
        _watch(model.graph, name, "ReduceMax", "highest")
    graph = StaticGraph(open_beside(model, path), sliding_window=sliding_window)
    low = dict.fromkeys(names, np.inf)
    high = dict.fromkeys(names, -np.inf)
    given: list[Array] = []
    passed_on = [v.name for v in model.graph.output if v.name.endswith(".residual")]
    for i, window in enumerate(windows):
        for outputs in graph.run(window):
            given += [outputs[name][0] for name in passed_on]
            for name in names:
                low[name] = min(low[name], float(outputs[f"{name}.lowest"]))
                high[name] = max(high[name], float(outputs[f"{name}.highest"]))
        tell(i + 1, len(windows))
    ranges = {name: (low[name], high[name]) for name in names}
    for value in model.graph.input:
        if value.name.endswith("_mask"):
            ranges[value.name] = (-100.0, 0.0)
        elif value.name.endswith(".residual"):
            ranges[value.name] = (float(windows.min()), float(windows.max()))
    rows = np.concatenate(given) if given else np.zeros(0, np.float32)
    return ranges, rows.reshape(*windows.shape[:2], -1)


def _watch(graph: Any, name: str, op: str, what: str) -> None:
    from onnx import TensorProto, helper

    graph.node.append(helper.make_node(op, [name], [f"{name}.{what}"], keepdims=0))
    graph.output.append(helper.make_tensor_value_info(f"{name}.{what}", TensorProto.FLOAT, []))
