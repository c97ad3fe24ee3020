"""Node by node, the decoder of the HTP flavour: see `decoder_graph` for its signature.

Values keep their names in the graphs of all lengths, so that what was calibrated on one
holds for the others: `layers.{i}.{module}` is what a projection gives, its weight is
`layers.{i}.{module}.weight`, and `layers.{i}.keys` and `.values` are the cache with the new
rows after it.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from ..architecture import DecoderConfig
from ..graph_writer import GraphWriter
from ..lora_branch import LoraBranches
from .token_places import TokenPlaces

Floats = npt.NDArray[np.float32]

_SANDWICH_SCALE = 2.0**-8
"""Of the residual stream between sandwich norms, which Gemma 3 lets grow beyond what 16 bits
hold (104,000 in the 270M model). Every update of it comes out of a norm, and every use goes
into one, so the scale cancels; a power of two is exact."""


class HtpDecoderNodes:
    """The graph of one model and length; `build` adds it, a layer at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Callable[[str], Floats],
        graph: GraphWriter,
        *,
        layers: range,
        length: int,
        context_length: int,
        num_positions: int,
        lora_rank: int,
        lora_modules: Collection[str],
        has_hidden_states: bool,
    ) -> None:
        self._config = config
        self._shapes = config.tensor_shapes()
        self._tensors = tensors
        self._graph = graph
        self._residual_scale = _SANDWICH_SCALE if config.has_sandwich_norms else 1.0
        self._group = config.num_heads // config.num_kv_heads
        self._layers = layers
        self._length = length
        self._hidden_shape = [1, length, config.hidden_size]
        self._context_length = context_length
        self._places = TokenPlaces(
            graph,
            config,
            length=length,
            context_length=context_length,
            num_positions=num_positions,
        )
        self._lora = LoraBranches(graph, config, rank=lora_rank, modules=lora_modules)
        self._has_hidden_states = has_hidden_states

    def build(self) -> None:
        """Add inputs, nodes, tensors and outputs."""
        first, end = self._layers.start, self._layers.stop
        residual = self._embed() if first == 0 else self._continue(f"layers.{first - 1}.residual")
        self._places.add(self._layers)
        for i in self._layers:
            at = f"layers.{i}"
            update = self._attention(self._residual_norm(residual, f"{at}.input_norm"), i)
            residual = self._graph.node("Add", [residual, update], f"{at}.attention_residual")
            update = self._mlp(self._residual_norm(residual, f"{at}.mlp_norm"), i)
            residual = self._graph.node("Add", [residual, update], f"{at}.residual")
        if end == self._config.num_layers:
            self._head(self._residual_norm(residual, "final_norm", "hidden_states"))
        else:
            self._graph.output(residual, np.float32, self._hidden_shape)
        self._add_cache_outputs()

    def _continue(self, residual: str) -> str:
        """What the part before gave, under the name it has in the whole graph."""
        return self._graph.input(residual, np.float32, self._hidden_shape)

    def _embed(self) -> str:
        graph, scale = self._graph, self._config.embedding_scale
        ids = graph.input("input_ids", np.int32, [1, self._length])
        scale *= self._residual_scale
        table = graph.shared_tensor("embed_tokens.weight", lambda: self._tensors("embed_tokens"))
        if scale == 1.0:
            return graph.node("Gather", [table, ids], "embed_tokens")
        embedded = graph.node("Gather", [table, ids], "embed_tokens.rows")
        factor = graph.tensor("embed_tokens.scale", np.array(scale, np.float32))
        return graph.node("Mul", [embedded, factor], "embed_tokens")

    def _attention(self, x: str, index: int) -> str:
        config, at, rotate = self._config, f"layers.{index}", self._places.rotate
        norms = ("q_norm", "k_norm") if config.has_qk_norm else ("", "")
        query = self._project(x, index, "q")
        query = self._heads(query, config.num_heads, f"{at}.query", norm=norms[0])
        key = self._project(x, index, "k")
        key = self._heads(key, config.num_kv_heads, f"{at}.key", norm=norms[1])
        grouped = [1, config.num_kv_heads, self._group * self._length, config.head_dim]
        query = self._reshape(query, grouped, f"{at}.query_grouped")
        query = rotate(query, index, "query", f"{at}.query_rotated")
        rotate(key, index, "key", f"new.{index}.key")
        self._heads(self._project(x, index, "v"), config.num_kv_heads, f"new.{index}.value")
        projected = self._project(self._attend(query, index), index, "o")
        if not config.has_sandwich_norms:
            return projected
        return self._update_norm(projected, f"{at}.post_attention_norm")

    def _attend(self, query: str, index: int) -> str:
        """Softmax attention over the cache and the new rows, ``[1, S, heads * head_dim]``.

        The queries that share a key head are rows of one product, so no key is repeated; as
        an Einsum, which QNN makes a product with turned keys, the cache is not transposed.

        Args:
            query: ``[1, kv_heads, group * S, head_dim]``
            index: Of the layer.
        """
        config, graph, at = self._config, self._graph, f"layers.{index}"
        heads, dim = config.num_heads, config.head_dim
        keys, values = self._extend(index, "key"), self._extend(index, "value")
        scores = graph.node("Einsum", [query, keys], f"{at}.scores", equation="bkrd,bktd->bkrt")
        masked = graph.node("Add", [scores, self._places.mask(index)], f"{at}.masked")
        weights = graph.node("Softmax", [masked], f"{at}.weights", axis=-1)
        attended = graph.node("MatMul", [weights, values], f"{at}.attended_grouped")
        apart = self._reshape(attended, [1, heads, self._length, dim], f"{at}.attended_heads")
        merged = self._swap(apart, [1, self._length, heads, dim], f"{at}.attended_tokens")
        return self._reshape(merged, [1, self._length, heads * dim], f"{at}.attended")

    def _extend(self, index: int, part: str) -> str:
        config, graph = self._config, self._graph
        cache = [1, config.num_kv_heads, self._context_length, config.head_dim]
        past = graph.input(f"past_key_values.{index}.{part}", np.float32, cache)
        new = f"new.{index}.{part}"
        return graph.node("Concat", [past, new], f"layers.{index}.{part}s", axis=2)

    def _mlp(self, x: str, index: int) -> str:
        config, graph, at = self._config, self._graph, f"layers.{index}"
        gate, up = self._project(x, index, "gate"), self._project(x, index, "up")
        if config.activation == "silu":
            opened = graph.node("Sigmoid", [gate], f"{at}.gate_opened")
            active = graph.node("Mul", [gate, opened], f"{at}.active")
        else:
            active = graph.node("Gelu", [gate], f"{at}.active", approximate="tanh")
        inner = graph.node("Mul", [active, up], f"{at}.inner")
        projected = self._project(inner, index, "down")
        if not config.has_sandwich_norms:
            return projected
        return self._update_norm(projected, f"{at}.post_mlp_norm")

    def _head(self, hidden: str) -> None:
        """Logits from the rows of the head as the checkpoint has them, for a tied one is shared."""
        config, graph = self._config, self._graph
        if config.has_tied_head and graph.has("embed_tokens.weight"):
            weight = graph.view(
                "lm_head.weight", "embed_tokens.weight", self._shapes["embed_tokens"]
            )
        else:
            source = "embed_tokens" if config.has_tied_head else "lm_head"
            weight = graph.shared_tensor("lm_head.weight", lambda: self._tensors(source))
        rows = self._reshape(hidden, [self._length, config.hidden_size], "head_rows")
        product = graph.node("Gemm", [rows, weight], "lm_head", transB=1)
        shape = [1, self._length, config.num_logits]
        graph.output(self._reshape(product, list(shape), "logits"), np.float32, shape)
        if self._has_hidden_states:
            graph.output(hidden, np.float32, self._hidden_shape)

    def _add_cache_outputs(self) -> None:
        config = self._config
        shape = [1, config.num_kv_heads, self._length, config.head_dim]
        for i in self._layers:
            for part in ("key", "value"):
                self._graph.output(f"new.{i}.{part}", np.float32, shape)

    def _project(self, x: str, index: int, part: str) -> str:
        """``x @ weight + bias`` and the LoRA branch; the weight is stored ``[in, out]``."""
        graph, module = self._graph, f"{part}_proj"
        at = f"layers.{index}.{module}"
        weight = graph.shared_tensor(f"{at}.weight", lambda: self._tensors(at).T)
        bias = f"layers.{index}.{part}_bias"
        if bias in self._shapes:
            graph.shared_tensor(f"{at}.bias", lambda: self._tensors(bias))
            product = graph.node("MatMul", [x, weight], f"{at}.product")
            projected = graph.node("Add", [product, f"{at}.bias"], at)
        else:
            projected = graph.node("MatMul", [x, weight], at)
        return self._lora.add(projected, x, index, module)

    def _residual_norm(self, residual: str, name: str, output: str = "") -> str:
        """Norm of the residual stream as if it were not scaled."""
        return self._norm(residual, name, output or name, epsilon_scale=self._residual_scale**2)

    def _update_norm(self, x: str, name: str) -> str:
        """Norm of an update of the residual stream, which takes on its scale."""
        return self._norm(x, name, name, weight_scale=self._residual_scale)

    def _norm(
        self,
        x: str,
        name: str,
        output: str,
        *,
        weight_scale: float = 1.0,
        epsilon_scale: float = 1.0,
    ) -> str:
        weight = self._graph.shared_tensor(
            f"{name}.weight", lambda: self._tensors(name) * np.float32(weight_scale)
        )
        epsilon = self._config.norm_eps * epsilon_scale
        return self._graph.node("RMSNormalization", [x, weight], output, axis=-1, epsilon=epsilon)

    def _heads(self, x: str, heads: int, output: str, norm: str = "") -> str:
        """``[1, S, heads * head_dim]`` as ``[1, heads, S, head_dim]``, each head normed if asked.

        The norm is of ``[1, rows, head_dim]``: with four dimensions, the HTP gets it wrong
        where the second is more than 8 and the last is small.
        """
        dim = self._config.head_dim
        if norm:
            rows = self._reshape(x, [1, self._length * heads, dim], f"{output}.rows")
            name = f"{output.rpartition('.')[0]}.{norm}"
            x = self._norm(rows, name, name)
        apart = self._reshape(x, [1, self._length, heads, dim], f"{output}.heads")
        return self._swap(apart, [1, heads, self._length, dim], output)

    def _swap(self, x: str, shape: Sequence[int], output: str) -> str:
        """Swap tokens and heads, into `shape`.

        With one token nothing moves, and a quantised Transpose of it goes wrong on v69.
        """
        if self._length == 1:
            return self._reshape(x, shape, output)
        return self._graph.node("Transpose", [x], output, perm=[0, 2, 1, 3])

    def _reshape(self, x: str, shape: Sequence[int], output: str) -> str:
        name = "shape." + "x".join(map(str, shape))
        if not self._graph.has(name):
            self._graph.tensor(name, np.array(shape, np.int64))
        return self._graph.node("Reshape", [x, name], output)
