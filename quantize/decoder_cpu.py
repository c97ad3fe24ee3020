"""The decoder graph of the CPU flavour: dynamic lengths, ONNX Runtime's fused operators.

Its signature is onnxruntime-genai's, so a target built there and one built here are the
same to the runtime:

===============================  ================================  =========================
`input_ids`                      int64 ``[batch, length]``         tokens to append
`attention_mask`                 int64 ``[batch, total]``          ones; total = kept + length
`past_key_values.{i}.key|value`  ``[batch, kv_heads, past, dim]``  cache; may be `present`
`logits_from`                    int64 ``[1]``, 0 if not fed       first position with logits
`lora.layers.{i}.{module}.A|B`   ``[in, rank]``, ``[rank, out]``   where a rank is declared
`logits`                         ``[batch, n, num_logits]``        n = length - logits_from
`present.{i}.key|value`          as the past, grown if not shared
`hidden_states`                  ``[batch, length, hidden]``       where asked; after final norm
===============================  ================================  =========================
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnidraft_npu.errors import ConfigError
from omnidraft_npu.lora import MODULES, lora_name

from .architecture import DecoderConfig
from .cpu_weights import CpuWeights, Precision
from .graph_writer import MICROSOFT, GraphWriter
from .rotary import rotary_tables
from .weight_quantization import Bits

Floats = npt.NDArray[np.float32]
Tensors = Callable[[str], Floats]

_OPSET = 21
_BITS: dict[str, Bits | None] = {"fp32": None, "int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class CpuGraphOptions:
    """What a CPU graph can do beyond its model."""

    precision: Precision = "int8"
    context_length: int
    """Rows of the rotary tables: the most tokens a cache can hold."""
    lora_rank: int = 0
    """Rank of the LoRA inputs; 0 leaves them out."""
    lora_modules: tuple[str, ...] = MODULES
    """Projections with LoRA inputs, where there is a rank."""
    has_hidden_states: bool = False
    """Whether the graph also gives `hidden_states`."""

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ConfigError(
                f"context_length is {self.context_length}, must be at least 1: "
                "use --context-length 16 or more"
            )
        if self.lora_rank < 0:
            raise ConfigError(
                f"lora_rank is {self.lora_rank}, must not be negative: use 0 for no LoRA inputs"
            )
        if unknown := set(self.lora_modules) - set(MODULES):
            raise ConfigError(
                f"lora_modules has {', '.join(sorted(unknown))}: choose from {', '.join(MODULES)}"
            )


def build_cpu_decoder(
    config: DecoderConfig,
    tensors: Tensors,
    folder: Path,
    options: CpuGraphOptions,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write ``model.onnx`` and ``model.onnx.data`` into `folder`, one tensor after another.

    Args:
        config: Shape and variant of the model.
        tensors: Gives a tensor by its canonical name; each is asked for once.
        folder: Made if absent. Nothing is left in it if the build fails.
        options: Precision, context, LoRA, hidden states.
        progress: Told the name of each tensor that is read.

    Returns:
        Path of the graph.

    Raises:
        ExportError: the folder cannot be written.
    """

    def read(name: str) -> Floats:
        if progress is not None:
            progress(name)
        return tensors(name)

    with GraphWriter(folder, opset=_OPSET) as graph:
        _CpuDecoder(config, read, options, graph).build()
    return graph.model_path


class _CpuDecoder:
    """The graph of one model; `build` adds it node by node."""

    def __init__(
        self, config: DecoderConfig, tensors: Tensors, options: CpuGraphOptions, graph: GraphWriter
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._options = options
        self._graph = graph
        bits = _BITS[options.precision]
        self._weights = CpuWeights(graph, bits, bits)

    def build(self) -> None:
        config, graph = self._config, self._graph
        ids = graph.input("input_ids", np.int64, ["batch", "length"])
        self._add_lengths()
        self._add_rotary_tables()
        residual = self._embed(ids)
        normed = self._norm(residual, "layers.0.input_norm", "layers.0.input")
        for i in range(config.num_layers):
            at = f"layers.{i}"
            attended = self._attention(normed, i)
            if config.has_sandwich_norms:
                attended = self._norm(attended, f"{at}.post_attention_norm")
            normed, residual = self._add_and_norm(residual, attended, f"{at}.mlp_norm")
            expanded = self._mlp(normed, i)
            if config.has_sandwich_norms:
                expanded = self._norm(expanded, f"{at}.post_mlp_norm")
            is_last = i == config.num_layers - 1
            next_norm = "final_norm" if is_last else f"layers.{i + 1}.input_norm"
            normed, residual = self._add_and_norm(
                residual, expanded, next_norm, "hidden_states" if is_last else ""
            )
        self._add_outputs(normed)

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

    def _add_rotary_tables(self) -> None:
        config = self._config
        for name, rope in (("rope", config.rope), ("local_rope", config.local_rope)):
            if rope is None:
                continue
            tables = rotary_tables(rope, config.head_dim, self._options.context_length)
            for part, table in zip(("cos", "sin"), tables, strict=True):
                self._graph.tensor(f"{name}.{part}", table)

    def _embed(self, ids: str) -> str:
        config = self._config
        embedded = self._weights.embed(ids, self._tensors("embed_tokens"), "embed_tokens")
        if config.embedding_scale == 1.0:
            return embedded
        scale = self._graph.tensor("embedding_scale", np.array(config.embedding_scale, np.float32))
        return self._graph.node("Mul", [embedded, scale], "embed_tokens.scaled")

    def _attention(self, x: str, layer: int) -> str:
        config, graph, at = self._config, self._graph, f"layers.{layer}"
        packed = self._packed(x, layer, ("q", "k", "v"), "qkv", has_bias=config.has_qkv_bias)
        widths = [h * config.head_dim for h in (config.num_heads, *[config.num_kv_heads] * 2)]
        query_key_value = [packed, "", ""]
        if config.has_qk_norm or self._is_adapted("q_proj", "k_proj", "v_proj"):
            query_key_value = self._split(packed, widths, [f"{at}.{p}_proj" for p in "qkv"])
            for j, part in enumerate("qkv"):
                query_key_value[j] = self._adapt(query_key_value[j], x, layer, f"{part}_proj")
        if config.has_qk_norm:
            for j, (part, heads) in enumerate(
                (("q", config.num_heads), ("k", config.num_kv_heads))
            ):
                query_key_value[j] = self._norm_heads(
                    query_key_value[j], f"{at}.{part}_norm", heads
                )
        attended = self._attend(query_key_value, layer)
        return self._adapted_projection(attended, layer, "o", has_bias=config.has_output_bias)

    def _attend(self, query_key_value: list[str], layer: int) -> str:
        config, graph = self._config, self._graph
        is_sliding = config.layer_types[layer] == "sliding"
        rope = "local_rope" if is_sliding and config.local_rope is not None else "rope"
        cache = ["batch", config.num_kv_heads, "past", config.head_dim]
        past = [
            graph.input(f"past_key_values.{layer}.{part}", np.float32, cache)
            for part in ("key", "value")
        ]
        window = config.sliding_window if is_sliding and config.sliding_window else -1
        return graph.node(
            "GroupQueryAttention",
            [
                *query_key_value,
                *past,
                "last_position",
                "total_length",
                f"{rope}.cos",
                f"{rope}.sin",
            ],
            [f"layers.{layer}.attended", f"present.{layer}.key", f"present.{layer}.value"],
            domain=MICROSOFT,
            num_heads=config.num_heads,
            kv_num_heads=config.num_kv_heads,
            scale=float(config.attention_scale),
            do_rotary=1,
            local_window_size=window,
        )

    def _mlp(self, x: str, layer: int) -> str:
        config, graph, at = self._config, self._graph, f"layers.{layer}"
        packed = self._packed(x, layer, ("gate", "up"), "gate_up", has_bias=config.has_mlp_bias)
        gate, up = self._split(
            packed, [config.intermediate_size] * 2, [f"{at}.gate_proj", f"{at}.up_proj"]
        )
        gate = self._adapt(gate, x, layer, "gate_proj")
        up = self._adapt(up, x, layer, "up_proj")
        active = f"{at}.active"
        if config.activation == "silu":
            graph.node("QuickGelu", [gate], active, domain=MICROSOFT, alpha=1.0)
        else:
            graph.node("Gelu", [gate], active, approximate="tanh")
        inner = graph.node("Mul", [active, up], f"{at}.inner")
        return self._adapted_projection(inner, layer, "down", has_bias=config.has_mlp_bias)

    def _packed(
        self, x: str, layer: int, parts: tuple[str, ...], name: str, *, has_bias: bool
    ) -> str:
        """Projections of one input as a single product: fewer, larger pieces of work."""
        at = f"layers.{layer}"
        weight = np.concatenate([self._tensors(f"{at}.{part}_proj") for part in parts])
        bias = None
        if has_bias:
            bias = np.concatenate([self._tensors(f"{at}.{part}_bias") for part in parts])
        return self._weights.project(x, weight, f"{at}.{name}", bias)

    def _adapted_projection(self, x: str, layer: int, part: str, *, has_bias: bool) -> str:
        at = f"layers.{layer}.{part}"
        bias = self._tensors(f"{at}_bias") if has_bias else None
        projected = self._weights.project(x, self._tensors(f"{at}_proj"), f"{at}_proj", bias)
        return self._adapt(projected, x, layer, f"{part}_proj")

    def _adapt(self, projected: str, x: str, layer: int, module: str) -> str:
        """Add the LoRA branch, if `module` has one."""
        if not self._is_adapted(module):
            return projected
        graph, rank = self._graph, self._options.lora_rank
        out, in_features = self._config.tensor_shapes()[f"layers.{layer}.{module}"]
        a = graph.input(lora_name(layer, module, "A"), np.float32, [in_features, rank])
        b = graph.input(lora_name(layer, module, "B"), np.float32, [rank, out])
        at = f"layers.{layer}.{module}"
        low = graph.node("MatMul", [x, a], f"{at}.lora_low")
        delta = graph.node("MatMul", [low, b], f"{at}.lora")
        return graph.node("Add", [projected, delta], f"{at}.adapted")

    def _is_adapted(self, *modules: str) -> bool:
        return self._options.lora_rank > 0 and bool(set(modules) & set(self._options.lora_modules))

    def _split(self, packed: str, widths: list[int], names: list[str]) -> list[str]:
        key = "widths." + "_".join(map(str, widths))
        if not self._graph.has(key):
            self._graph.tensor(key, np.array(widths, np.int64))
        self._graph.node("Split", [packed, key], names, axis=-1)
        return names

    def _norm(self, x: str, weight: str, name: str = "") -> str:
        return self._graph.node(
            "SimplifiedLayerNormalization",
            [x, self._norm_weight(weight)],
            name or f"{weight}ed",
            axis=-1,
            epsilon=self._config.norm_eps,
        )

    def _norm_heads(self, x: str, weight: str, heads: int) -> str:
        """Norm each head's slice of the last axis."""
        graph, dim = self._graph, self._config.head_dim
        for shape, value in ((f"heads.{heads}", [0, 0, heads, dim]), ("merged", [0, 0, -1])):
            if not graph.has(shape):
                graph.tensor(shape, np.array(value, np.int64))
        apart = graph.node("Reshape", [x, f"heads.{heads}"], f"{weight}.heads")
        return graph.node("Reshape", [self._norm(apart, weight), "merged"], f"{weight}.merged")

    def _add_and_norm(self, residual: str, x: str, weight: str, name: str = "") -> tuple[str, str]:
        """Norm of the sum, and the sum."""
        total = f"{weight}.residual"
        normed = self._graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, x, self._norm_weight(weight)],
            [name or f"{weight}ed", "", "", "" if name else total],
            domain=MICROSOFT,
            epsilon=self._config.norm_eps,
        )
        return normed, total

    def _norm_weight(self, name: str) -> str:
        return self._graph.tensor(f"{name}.weight", self._tensors(name))

    def _add_outputs(self, hidden: str) -> None:
        config, graph = self._config, self._graph
        first = graph.optional_input("logits_from", np.array([0], np.int64))
        end = graph.tensor("end", np.array([np.iinfo(np.int64).max], np.int64))
        rows = graph.node("Slice", [hidden, first, end, "one"], "head_rows")
        head = None if config.has_tied_head else self._tensors("lm_head")
        self._weights.head(rows, head, config.num_logits, "logits", tied="embed_tokens")
        graph.output("logits", np.float32, ["batch", "num_rows", config.num_logits])
        cache = ["batch", config.num_kv_heads, "present", config.head_dim]
        for i in range(config.num_layers):
            for part in ("key", "value"):
                graph.output(f"present.{i}.{part}", np.float32, cache)
        if self._options.has_hidden_states:
            graph.output("hidden_states", np.float32, ["batch", "length", config.hidden_size])


def _onnx_type(dtype: npt.DTypeLike) -> int:
    from onnx import helper

    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
