"""The graph that only fills the cache: nothing is left in it that no cache row needs."""

from pathlib import Path

from omnidraft_npu.files import atomic_path

_CACHE, _RESIDUAL = "new.", ".residual"


def keep_cache_rows_only(path: Path) -> None:
    """Take the logits, the hidden states and what only they need out of the graph at `path`.

    A prefill reads none of them: the token after it is scored by another graph. Besides the
    head, the last layer ends with its keys and values. Weights stay in their file, where the
    graphs of the other lengths find them.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    outputs = [v for v in graph.output if v.name.startswith(_CACHE) or v.name.endswith(_RESIDUAL)]
    needed = {value.name for value in outputs}
    nodes = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            nodes.append(node)
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, kept in (
        (graph.output, outputs),
        (graph.node, nodes[::-1]),
        (graph.initializer, tensors),
    ):
        del field[:]
        field.extend(kept)
    with atomic_path(path) as new:
        new.write_bytes(model.SerializeToString())
