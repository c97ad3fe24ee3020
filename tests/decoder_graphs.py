"""Hand-made two-layer decoders with random weights, of both cache kinds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 4, 2, 16, 32
VOCAB, NUM_LOGITS, RANK = 40, 48, 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs between the graphs that the runtime meets."""

    is_shared: bool = False
    """Past and present of one fixed length; otherwise the present is longer than the past."""
    has_gqa: bool = True
    """`GroupQueryAttention` with rotary inside; otherwise attention of standard operators."""
    context_length: int = 64
    has_logits_from: bool = False
    has_hidden_states: bool = False
    has_lora: bool = False
    has_open_head_dim: bool = False
    """Whether the cache's shape names no head size, as onnxruntime-genai's builder does it."""
    inputs: tuple[str, ...] = ("attention_mask",)
    float_type: int = T.FLOAT
    """Of the cache and the logits."""


SHARED = Variant(is_shared=True, has_logits_from=True, has_hidden_states=True, has_lora=True)
GENAI = Variant()
OPTIMUM = Variant(has_gqa=False, inputs=("attention_mask", "position_ids"))
HALF = Variant(has_gqa=False, inputs=("cache_position",), float_type=T.FLOAT16)
BARE = Variant(has_gqa=False, inputs=())


class _Graph:
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.rng = np.random.default_rng(7)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        out = f"t{len(self.nodes)}"
        domain = "com.microsoft" if op == "GroupQueryAttention" else ""
        self.nodes.append(helper.make_node(op, inputs, [out], domain=domain, **attributes))
        return out

    def constant(self, value: object, dtype: type = np.int64) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def random(self, *shape: int) -> str:
        return self.constant(self.rng.normal(0, 1 / np.sqrt(shape[0]), shape), np.float32)


def write_decoder(path: Path, variant: Variant) -> Path:
    """Write the graph; equal variants give equal weights."""
    g = _Graph(variant)
    position = _positions(g)
    x = g.add(
        "Gather", g.constant(g.rng.normal(size=(NUM_LOGITS, HIDDEN)), np.float32), "input_ids"
    )
    if not variant.has_gqa:
        x = g.add("Add", x, g.add("Gather", g.random(variant.context_length, HIDDEN), position))
    for i in range(LAYERS):
        heads = KV_HEADS if not variant.has_gqa else HEADS
        q = g.add("MatMul", x, g.random(HIDDEN, heads * HEAD_DIM))
        if variant.has_lora:
            a, b = f"lora.layers.{i}.q_proj.A", f"lora.layers.{i}.q_proj.B"
            q = g.add("Add", q, g.add("MatMul", g.add("MatMul", x, a), b))
        k = g.add("MatMul", x, g.random(HIDDEN, KV_HEADS * HEAD_DIM))
        v = g.add("MatMul", x, g.random(HIDDEN, KV_HEADS * HEAD_DIM))
        attention = _gqa if variant.has_gqa else _attention
        out = attention(g, i, q, k, v, position)
        x = g.add("Add", x, g.add("MatMul", out, g.random(heads * HEAD_DIM, HIDDEN)))
    g.nodes.append(helper.make_node("Tanh", [x], ["hidden_states"]))
    rows = "hidden_states"
    if variant.has_logits_from:
        end, axis = g.constant([2**62]), g.constant([1])
        rows = g.add("Slice", rows, "logits_from", end, axis)
    logits = g.add("MatMul", rows, g.random(HIDDEN, NUM_LOGITS))
    g.nodes.append(helper.make_node("Cast", [logits], ["logits"], to=variant.float_type))
    onnx.save(_model(g), path)
    return path


def _positions(g: _Graph) -> str:
    """``[n]`` positions of the new tokens, from what the variant feeds."""
    if "cache_position" in g.variant.inputs:
        return "cache_position"
    if "position_ids" in g.variant.inputs:
        return g.add("Squeeze", "position_ids", g.constant([0]))
    if g.variant.is_shared or g.variant.has_gqa:
        return ""
    zero, one = g.constant(0), g.constant(1)
    past = g.add("Squeeze", g.add("Shape", "past_key_values.0.key", start=2, end=3))
    new = g.add("Squeeze", g.add("Shape", "input_ids", start=1, end=2))
    return g.add("Add", g.add("Range", zero, new, one), past)


def _gqa(g: _Graph, i: int, q: str, k: str, v: str, position: str) -> str:
    last = g.add(
        "Sub", g.add("ReduceSum", "attention_mask", g.constant([1]), keepdims=0), g.constant(1)
    )
    total = g.add("Squeeze", g.add("Shape", "attention_mask", start=1, end=2))
    angles = np.outer(np.arange(g.variant.context_length), 10.0 ** -np.arange(HEAD_DIM // 2))
    past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
    out = f"attention.{i}"
    g.nodes.append(
        helper.make_node(
            "GroupQueryAttention",
            [q, k, v, *past]
            + [g.add("Cast", x, to=T.INT32) for x in (last, total)]
            + [g.constant(f(angles), np.float32) for f in (np.cos, np.sin)],
            [out, f"present.{i}.key", f"present.{i}.value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
        )
    )
    return out


def _attention(g: _Graph, i: int, q: str, k: str, v: str, position: str) -> str:
    shape = g.constant([1, -1, KV_HEADS, HEAD_DIM])
    q, k, v = (g.add("Transpose", g.add("Reshape", x, shape), perm=[0, 2, 1, 3]) for x in (q, k, v))
    both = []
    for side, new in (("key", k), ("value", v)):
        past = g.add("Cast", f"past_key_values.{i}.{side}", to=T.FLOAT)
        # Rounded before use, so that a cached row is what the run that made it saw.
        new = g.add("Cast", g.add("Cast", new, to=g.variant.float_type), to=T.FLOAT)
        both.append(g.add("Concat", past, new, axis=2))
        present = f"present.{i}.{side}"
        g.nodes.append(helper.make_node("Cast", [both[-1]], [present], to=g.variant.float_type))
    scores = g.add("MatMul", q, g.add("Transpose", both[0], perm=[0, 1, 3, 2]))
    total = g.add("Squeeze", g.add("Shape", both[0], start=2, end=3))
    column = g.add("Range", g.constant(0), total, g.constant(1))
    seen = g.add("LessOrEqual", column, g.add("Unsqueeze", position, g.constant([1])))
    if "attention_mask" in g.variant.inputs:
        seen = g.add("And", seen, g.add("Cast", "attention_mask", to=T.BOOL))
    scores = g.add("Where", seen, scores, g.constant(-1e9, np.float32))
    out = g.add("MatMul", g.add("Softmax", scores, axis=-1), both[1])
    out = g.add("Transpose", out, perm=[0, 2, 1, 3])
    return g.add("Reshape", out, g.constant([1, -1, KV_HEADS * HEAD_DIM]))


def _model(g: _Graph) -> onnx.ModelProto:
    v, info = g.variant, helper.make_tensor_value_info
    past = v.context_length if v.is_shared else "past"
    present = v.context_length if v.is_shared else "total"
    head_dim = "head_dim" if v.has_open_head_dim else HEAD_DIM
    shapes = {
        "attention_mask": [1, "total"],
        "position_ids": [1, "length"],
        "cache_position": ["length"],
    }
    inputs = [info("input_ids", T.INT64, [1, "length"])]
    inputs += [info(name, T.INT64, shapes.get(name, [1, "length"])) for name in v.inputs]
    outputs = [info("logits", v.float_type, [1, "rows", NUM_LOGITS])]
    for i in range(LAYERS):
        for side in ("key", "value"):
            name = f"{i}.{side}"
            inputs.append(
                info(f"past_key_values.{name}", v.float_type, [1, KV_HEADS, past, head_dim])
            )
            outputs.append(info(f"present.{name}", v.float_type, [1, KV_HEADS, present, head_dim]))
        if v.has_lora:
            inputs.append(info(f"lora.layers.{i}.q_proj.A", T.FLOAT, [HIDDEN, RANK]))
            inputs.append(info(f"lora.layers.{i}.q_proj.B", T.FLOAT, [RANK, HEADS * HEAD_DIM]))
    if v.has_hidden_states:
        outputs.append(info("hidden_states", T.FLOAT, [1, "length", HIDDEN]))
    if v.has_logits_from:
        inputs.append(info("logits_from", T.INT64, [1]))
        g.weights.append(numpy_helper.from_array(np.zeros(1, np.int64), "logits_from"))
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, g.weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
