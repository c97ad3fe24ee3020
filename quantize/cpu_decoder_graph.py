"""Node by node, the decoder of the CPU flavour: see `decoder_cpu` for its signature."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from omnidraft_npu.decoder_inputs import ATTENTION_ROWS, LOGITS_FROM
from omnidraft_npu.precision import Precision

from .architecture import DecoderConfig
from .cpu_weights import CpuWeights
from .graph_writer import MICROSOFT, Dimension, GraphWriter
from .head_padding import HeadPadding, padded_head_dim
from .input_sizes import RandomTokens
from .lora_branch import LoraBranches
from .rotary import rotary_tables

Floats = npt.NDArray[np.float32]


class CpuDecoderGraph:
    """The graph of one model; `build` adds it, a layer at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Callable[[str], Floats],
        graph: GraphWriter,
        *,
        precision: Precision,
        context_length: int,
        lora_rank: int,
        lora_modules: Collection[str],
        has_hidden_states: bool,
        has_attention_rows: bool,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._graph = graph
        self._weights = CpuWeights(graph, precision)
        self._head_padding = HeadPadding(graph, config.head_dim)
        self._context_length = context_length
        self._lora = LoraBranches(graph, config, rank=lora_rank, modules=lora_modules)
        self._has_hidden_states = has_hidden_states
        self._has_attention_rows = has_attention_rows

    def build(self) -> None:
        """Add inputs, nodes, tensors and outputs."""
        config = self._config
        ids = self._graph.input("input_ids", np.int64, ["batch", "length"])
        self._add_lengths()
        if self._has_attention_rows:
            self._add_attention_rows(ids)
        self._add_rotary_tables()
        embedding = self._tensors("embed_tokens")
        tokens = RandomTokens(config, embedding) if self._weights.wants_input_sizes else None
        residual, update = self._embed(ids, embedding), ""
        del embedding
        for i in range(config.num_layers):
            layer = self._read_layer(i)
            sizes = tokens.layer(i, layer) if tokens else {}
            x, residual = self._join(residual, update, f"layers.{i}.input_norm", layer)
            update = self._attention(x, i, layer, sizes)
            x, residual = self._join(residual, update, f"layers.{i}.mlp_norm", layer)
            update = self._mlp(x, i, layer, sizes)
        final = {"final_norm": self._tensors("final_norm")}
        hidden, _ = self._join(residual, update, "final_norm", final, "hidden_states")
        self._add_outputs(hidden)

    def _read_layer(self, index: int) -> dict[str, Floats]:
        prefix = f"layers.{index}."
        names = [name for name in self._config.tensor_shapes() if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._tensors(name) for name in names}

    def _add_lengths(self) -> None:
        """What GroupQueryAttention wants to know of the attention mask."""
        graph = self._graph
        mask = graph.input("attention_mask", np.int64, ["batch", "total"])
        one = graph.tensor("one", np.array([1], np.int64))
        kept = graph.node("ReduceSum", [mask, one], "mask.sum", keepdims=0)
        last = graph.node("Sub", [kept, one], "mask.last")
        graph.node("Cast", [last], "last_position", to=_onnx_type(np.int32))
        size = graph.node("Shape", [mask], "mask.total", start=1, end=2)
        scalar = graph.node("Squeeze", [size], "mask.total.scalar")
        graph.node("Cast", [scalar], "total_length", to=_onnx_type(np.int32))

    def _add_attention_rows(self, ids: str) -> None:
        """Which of the new rows attention sees: all, then the last one as often as asked for."""
        graph = self._graph
        least = graph.optional_input(ATTENTION_ROWS, np.array([1], np.int64))
        step = graph.tensor("rows.step", np.array(1, np.int64))
        start = graph.tensor("rows.start", np.array(0, np.int64))
        graph.tensor("rows.first", np.array([0], np.int64))
        length = graph.node("Shape", [ids], "rows.length", start=1, end=2)
        last = graph.node("Sub", [length, "one"], "rows.last")
        count = graph.node("Max", [length, least], "rows.count")
        end = graph.node("Squeeze", [count], "rows.end")
        positions = graph.node("Range", [start, end, step], "rows.range")
        graph.node("Min", [positions, last], "rows")

    def _add_rotary_tables(self) -> None:
        config = self._config
        for name, rope in (("rope", config.rope), ("local_rope", config.local_rope)):
            if rope is not None:
                cos, sin = rotary_tables(rope, config.head_dim, self._context_length)
                self._graph.tensor(f"{name}.cos", self._head_padding.table(cos))
                self._graph.tensor(f"{name}.sin", self._head_padding.table(sin))

    def _embed(self, ids: str, embedding: Floats) -> str:
        embedded = self._weights.embed(ids, embedding, "embed_tokens")
        if self._config.embedding_scale == 1.0:
            return embedded
        scale = self._graph.tensor("scale", np.array(self._config.embedding_scale, np.float32))
        return self._graph.node("Mul", [embedded, scale], "embed_tokens.scaled")

    def _attention(
        self, x: str, index: int, layer: Mapping[str, Floats], sizes: Mapping[str, Floats]
    ) -> str:
        config, at = self._config, f"layers.{index}"
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        inputs = [self._project_together(x, at, "qkv", ("q", "k", "v"), layer, sizes), "", ""]
        if config.has_qk_norm or self._lora.has("q_proj", "k_proj", "v_proj"):
            widths = [count * config.head_dim for count in heads]
            parts = self._split(inputs[0], widths, [f"{at}.{part}_proj" for part in "qkv"])
            inputs = [
                self._lora.add(part, x, index, f"{name}_proj")
                for part, name in zip(parts, "qkv", strict=True)
            ]
        if config.has_qk_norm:
            for j, name in enumerate(("q_norm", "k_norm")):
                inputs[j] = self._norm_heads(inputs[j], f"{at}.{name}", layer, heads[j])
        padded = self._head_padding.pad(inputs, f"{at}.attention_input")
        attended = self._head_padding.cut(self._attend(padded, index))
        projected = self._project(attended, index, "o", layer, sizes)
        if not config.has_sandwich_norms:
            return projected
        return self._norm(projected, f"{at}.post_attention_norm", layer)

    def _attend(self, query_key_value: Sequence[str], index: int) -> str:
        """Softmax attention over the cache, which it extends; rotary embedding inside."""
        config, graph = self._config, self._graph
        is_sliding = config.layer_types[index] == "sliding"
        rope = "local_rope" if is_sliding and config.local_rope is not None else "rope"
        window = config.sliding_window if is_sliding and config.sliding_window else -1
        head_dim = padded_head_dim(config.head_dim)
        cache: list[Dimension] = ["batch", config.num_kv_heads, "past", head_dim]
        past = [
            graph.input(f"past_key_values.{index}.{part}", np.float32, cache)
            for part in ("key", "value")
        ]
        lengths_and_tables = ["last_position", "total_length", f"{rope}.cos", f"{rope}.sin"]
        name = f"layers.{index}.attended"
        attended = graph.node(
            "GroupQueryAttention",
            [*self._repeat_last(query_key_value, name), *past, *lengths_and_tables],
            [
                f"{name}.all" if self._has_attention_rows else name,
                f"present.{index}.key",
                f"present.{index}.value",
            ],
            domain=MICROSOFT,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=float(config.attention_scale),
            do_rotary=1,
            local_window_size=window,
        )
        if not self._has_attention_rows:
            return attended
        return graph.node("Slice", [attended, "rows.first", "rows.length", "one"], name)

    def _repeat_last(self, inputs: Sequence[str], name: str) -> list[str]:
        """The rows that attention sees; "" stays."""
        if not self._has_attention_rows:
            return list(inputs)
        return [
            self._graph.node("Gather", [x, "rows"], f"{name}.rows.{i}", axis=1) if x else x
            for i, x in enumerate(inputs)
        ]

    def _mlp(
        self, x: str, index: int, layer: Mapping[str, Floats], sizes: Mapping[str, Floats]
    ) -> str:
        config, graph, at = self._config, self._graph, f"layers.{index}"
        packed = self._project_together(x, at, "gate_up", ("gate", "up"), layer, sizes)
        widths = [config.intermediate_size] * 2
        gate, up = self._split(packed, widths, [f"{at}.gate_proj", f"{at}.up_proj"])
        gate = self._lora.add(gate, x, index, "gate_proj")
        up = self._lora.add(up, x, index, "up_proj")
        active = f"{at}.active"
        if config.activation == "silu":
            graph.node("QuickGelu", [gate], active, domain=MICROSOFT, alpha=1.0)
        else:
            graph.node("Gelu", [gate], active, approximate="tanh")
        inner = graph.node("Mul", [active, up], f"{at}.inner")
        projected = self._project(inner, index, "down", layer, sizes)
        if not config.has_sandwich_norms:
            return projected
        return self._norm(projected, f"{at}.post_mlp_norm", layer)

    def _project_together(
        self,
        x: str,
        at: str,
        group: str,
        parts: Sequence[str],
        layer: Mapping[str, Floats],
        sizes: Mapping[str, Floats],
    ) -> str:
        """Projections of one input as a single product: fewer, larger pieces of work."""
        weight = np.concatenate([layer[f"{part}_proj"] for part in parts])
        biases = [layer[f"{part}_bias"] for part in parts if f"{part}_bias" in layer]
        bias = np.concatenate(biases) if biases else None
        return self._weights.project(x, f"{at}.{group}", weight, bias, sizes.get(group))

    def _project(
        self,
        x: str,
        index: int,
        part: str,
        layer: Mapping[str, Floats],
        sizes: Mapping[str, Floats],
    ) -> str:
        weight, bias = layer[f"{part}_proj"], layer.get(f"{part}_bias")
        name = f"layers.{index}.{part}_proj"
        projected = self._weights.project(x, name, weight, bias, sizes.get(part))
        return self._lora.add(projected, x, index, f"{part}_proj")

    def _split(self, packed: str, widths: Sequence[int], names: list[str]) -> list[str]:
        key = "widths." + "_".join(map(str, widths))
        if not self._graph.has(key):
            self._graph.tensor(key, np.array(widths, np.int64))
        self._graph.node("Split", [packed, key], names, axis=-1)
        return names

    def _norm(self, x: str, name: str, layer: Mapping[str, Floats]) -> str:
        return self._graph.node(
            "SimplifiedLayerNormalization",
            [x, self._norm_weight(name, layer)],
            f"{name}.out",
            axis=-1,
            epsilon=self._config.norm_eps,
        )

    def _norm_heads(self, x: str, name: str, layer: Mapping[str, Floats], heads: int) -> str:
        """Norm each head's slice of the last axis."""
        graph = self._graph
        apart = f"heads.{heads}"
        for shape, value in ((apart, [0, 0, heads, -1]), ("merged", [0, 0, -1])):
            if not graph.has(shape):
                graph.tensor(shape, np.array(value, np.int64))
        split = graph.node("Reshape", [x, apart], f"{name}.heads")
        return graph.node("Reshape", [self._norm(split, name, layer), "merged"], f"{name}.merged")

    def _join(
        self, residual: str, update: str, name: str, layer: Mapping[str, Floats], output: str = ""
    ) -> tuple[str, str]:
        """Add an update, if any, to the residual stream: the norm of the sum, and the sum."""
        if not update:
            return self._norm(residual, name, layer), residual
        total = f"{name}.residual"
        normed = self._graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, update, self._norm_weight(name, layer)],
            [output or f"{name}.out", "", "", total],
            domain=MICROSOFT,
            epsilon=self._config.norm_eps,
        )
        return normed, total

    def _norm_weight(self, name: str, layer: Mapping[str, Floats]) -> str:
        return self._graph.tensor(f"{name}.weight", layer[name.split(".")[-1]])

    def _add_outputs(self, hidden: str) -> None:
        config, graph = self._config, self._graph
        first = graph.optional_input(LOGITS_FROM, np.array([0], np.int64))
        end = graph.tensor("end", np.array([np.iinfo(np.int64).max], np.int64))
        rows = graph.node("Slice", [hidden, first, end, "one"], "head_rows")
        head = None if config.has_tied_head else self._tensors("lm_head")
        self._weights.head(rows, "logits", head, config.num_logits, tied="embed_tokens")
        graph.output("logits", np.float32, ["batch", "num_rows", config.num_logits])
        head_dim = padded_head_dim(config.head_dim)
        cache: list[Dimension] = ["batch", config.num_kv_heads, "present", head_dim]
        for i in range(config.num_layers):
            for part in ("key", "value"):
                graph.output(f"present.{i}.{part}", np.float32, cache)
        if self._has_hidden_states:
            graph.output("hidden_states", np.float32, ["batch", "length", config.hidden_size])


def _onnx_type(dtype: npt.DTypeLike) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
