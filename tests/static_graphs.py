"""Hand-made static decoders as the NPU runs them: fixed lengths, masks and positions as inputs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 2
HIDDEN_BY_MASK = -100.0


@dataclass(frozen=True, kw_only=True)
class StaticVariant:
    """What differs between the graphs."""

    context_length: int = 48
    num_logits: int = 48
    sliding_window: int | None = None
    """Of the last layer; None for full attention."""
    has_hidden_states: bool = False
    lora_rank: int = 0
    kv_type: int = T.FLOAT
    """UINT8 or UINT16 stores the cache with one scale."""
    seed: int = 7


class _Graph:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def add(self, op: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        out = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], name=out, **attributes))
        return out

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        self.weights.append(
            numpy_helper.from_array(np.asarray(value, dtype), f"c{len(self.weights)}")
        )
        return self.weights[-1].name

    def random(self, *shape: int) -> str:
        return self.constant(self.rng.normal(0, 1 / np.sqrt(shape[0]), shape), np.float32)


def write_static_decoder(
    folder: Path, lengths: tuple[int, ...], variant: StaticVariant
) -> dict[str, str]:
    """Write a graph for each length; equal variants have equal weights. Names by length."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for length in lengths:
        names[str(length)] = f"length_{length}.onnx"
        onnx.save(_model(length, variant), folder / names[str(length)])
    return names


def _model(length: int, v: StaticVariant) -> onnx.ModelProto:
    g, info = _Graph(v.seed), helper.make_tensor_value_info
    total = v.context_length + length
    inputs = [info("input_ids", T.INT32, [1, length]), info("position_ids", T.INT32, [1, length])]
    inputs.append(info("attention_mask", T.FLOAT, [1, 1, length, total]))
    if v.sliding_window is not None:
        inputs.append(info("sliding_mask", T.FLOAT, [1, 1, length, total]))
    outputs = [info("logits", T.FLOAT, [1, length, v.num_logits])]
    embed = g.constant(g.rng.normal(size=(v.num_logits, HIDDEN)), np.float32)
    places = g.constant(g.rng.normal(size=(v.context_length, HIDDEN)), np.float32)
    x = g.add("Add", g.add("Gather", embed, "input_ids"), g.add("Gather", places, "position_ids"))
    for i in range(LAYERS):
        is_sliding = v.sliding_window is not None and i == LAYERS - 1
        mask = "sliding_mask" if is_sliding else "attention_mask"
        out = _attention(g, v, i, x, mask, length)
        x = g.add("Add", x, g.add("MatMul", out, g.random(HEADS * HEAD_DIM, HIDDEN)))
        for side in ("key", "value"):
            shape = [1, KV_HEADS, v.context_length, HEAD_DIM]
            inputs.append(info(f"past_key_values.{i}.{side}", v.kv_type, shape))
            outputs.append(info(f"new.{i}.{side}", v.kv_type, [1, KV_HEADS, length, HEAD_DIM]))
        if v.lora_rank:
            inputs.append(info(f"lora.layers.{i}.q_proj.A", T.FLOAT, [HIDDEN, v.lora_rank]))
            shape = [v.lora_rank, HEADS * HEAD_DIM]
            inputs.append(info(f"lora.layers.{i}.q_proj.B", T.FLOAT, shape))
    x = g.add("Tanh", x, out="hidden_states" if v.has_hidden_states else None)
    if v.has_hidden_states:
        outputs.append(info("hidden_states", T.FLOAT, [1, length, HIDDEN]))
    g.add("MatMul", x, g.random(HIDDEN, v.num_logits), out="logits")
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _attention(g: _Graph, v: StaticVariant, i: int, x: str, mask: str, length: int) -> str:
    q = g.add("MatMul", x, g.random(HIDDEN, HEADS * HEAD_DIM))
    if v.lora_rank:
        low = g.add("MatMul", x, f"lora.layers.{i}.q_proj.A")
        q = g.add("Add", q, g.add("MatMul", low, f"lora.layers.{i}.q_proj.B"))
    q = _split(g, q, HEADS, length)
    both = []
    for side in ("key", "value"):
        new = _split(g, g.add("MatMul", x, g.random(HIDDEN, KV_HEADS * HEAD_DIM)), KV_HEADS, length)
        past = f"past_key_values.{i}.{side}"
        if v.kv_type == T.FLOAT:
            g.add("Identity", new, out=f"new.{i}.{side}")
        else:
            scale, zero = _cache_scale(g, v)
            new = g.add("QuantizeLinear", new, scale, zero, out=f"new.{i}.{side}")
            past, new = (g.add("DequantizeLinear", one, scale, zero) for one in (past, new))
        kv = g.add("Concat", past, new, axis=2)
        total = v.context_length + length
        for shape in ([1, KV_HEADS, 1, total, HEAD_DIM],):
            kv = g.add("Reshape", kv, g.constant(shape))
        kv = g.add("Concat", *[kv] * (HEADS // KV_HEADS), axis=2)
        both.append(g.add("Reshape", kv, g.constant([1, HEADS, total, HEAD_DIM])))
    scores = g.add("MatMul", q, g.add("Transpose", both[0], perm=[0, 1, 3, 2]))
    scores = g.add("Add", g.add("Mul", scores, g.constant(HEAD_DIM**-0.5, np.float32)), mask)
    out = g.add("MatMul", g.add("Softmax", scores, axis=-1), both[1])
    out = g.add("Transpose", out, perm=[0, 2, 1, 3])
    return g.add("Reshape", out, g.constant([1, length, HEADS * HEAD_DIM]))


def _split(g: _Graph, x: str, heads: int, length: int) -> str:
    x = g.add("Reshape", x, g.constant([1, length, heads, HEAD_DIM]))
    return g.add("Transpose", x, perm=[0, 2, 1, 3])


def _cache_scale(g: _Graph, v: StaticVariant) -> tuple[str, str]:
    bits, dtype = (8, np.uint8) if v.kv_type == T.UINT8 else (16, np.uint16)
    return g.constant(12.0 / 2**bits, np.float32), g.constant(2 ** (bits - 1), dtype)
