"""The forward pass of a drafter over whole rows, and its gradients backwards through it."""

from collections.abc import Callable, Collection, Sequence

from omnidraft_npu.lora import lora_name

from ..architecture import DecoderConfig
from ..head_padding import padded_head_dim
from .operators import Operators, Pullback
from .stored_weights import StoredWeights

_HIDDEN = -1e9

Projection = tuple[list[str], Callable[[Sequence[str], bool], str]]
"""What a product gives, by module, and the gradient of its input from theirs (left out, and
empty, where nobody wants it)."""


class TrainedDecoder:
    """A decoder whose LoRA tensors are inputs; `pull` gives `gradients`, by input."""

    def __init__(
        self,
        ops: Operators,
        config: DecoderConfig,
        weights: StoredWeights,
        *,
        lora_rank: int,
        lora_modules: Collection[str],
    ) -> None:
        """Declare the LoRA inputs in `ops`' graph."""
        self._ops = ops
        self._config = config
        self._weights = weights
        self._rank = lora_rank
        self._modules = lora_modules
        self._layers: list[Callable[[str], str]] = []
        self._masks: dict[int, str] = {}
        self._tables: dict[str, tuple[str, str]] = {}
        self._pull_final: Pullback | None = None
        self.gradients: dict[str, str] = {}

    def states(self, pieces: str) -> str:
        """Normed hidden states ``[batch, length, hidden]`` of ``[batch, length]`` pieces."""
        config, ops = self._config, self._ops
        self._add_positions(pieces)
        x = self._embed(pieces)
        for i in range(config.num_layers):
            x, pull_attention = self._attention(x, i)
            x, pull_mlp = self._mlp(x, i)
            self._layers += [pull_attention, pull_mlp]
        weight = self._weights.plain(ops.graph, "final_norm.weight")
        states, self._pull_final = ops.norm(x, weight, config.norm_eps)
        return states

    def pull(self, gradient: str) -> None:
        """Find the gradients of the LoRA tensors from that of the states."""
        if self._pull_final is None:
            raise ValueError("gradients come after states")
        gradient = self._pull_final(gradient)
        for pull in reversed(self._layers):
            gradient = pull(gradient)

    def _add_positions(self, pieces: str) -> None:
        """Rotary tables and, of every two positions, how far the first is behind the second."""
        ops, graph = self._ops, self._ops.graph
        rotated = ("rope", "local_rope") if self._config.local_rope else ("rope",)
        for name in rotated:
            self._tables[name] = self._table(f"{name}.cos"), self._table(f"{name}.sin")
            graph.node("Neg", [self._tables[name][1]], f"{name}.back")
        length = ops("Squeeze", ops("Shape", pieces, start=1, end=2))
        positions = ops("Range", ops.integer(0), length, ops.integer(1))
        rows, columns = (ops("Unsqueeze", positions, ops.integers(axis)) for axis in (1, 0))
        self._distance = ops("Sub", rows, columns)

    def _table(self, name: str) -> str:
        """A rotary table, without the columns for channels that the CPU graph adds."""
        table = self._weights.plain(self._ops.graph, name)
        half = self._config.head_dim // 2
        if padded_head_dim(self._config.head_dim) == 2 * half:
            return table
        bounds = [self._ops.integers(value) for value in (0, half, 1)]
        return self._ops("Slice", table, *bounds)

    def _mask(self, window: int | None) -> str:
        """``[length, length]``, 0 where a row sees a column, and far below 0 elsewhere."""
        ops, key = self._ops, window or 0
        if key not in self._masks:
            is_seen = ops("GreaterOrEqual", self._distance, ops.integer(0))
            if window:
                is_near = ops("Less", self._distance, ops.integer(window))
                is_seen = ops("And", is_seen, is_near)
            self._masks[key] = ops("Where", is_seen, ops.number(0.0), ops.number(_HIDDEN))
        return self._masks[key]

    def _embed(self, pieces: str) -> str:
        config, ops = self._config, self._ops
        x = self._weights.rows(ops.graph, "embed_tokens", pieces, config.hidden_size)
        if config.embedding_scale == 1.0:
            return x
        return ops("Mul", x, ops.number(config.embedding_scale))

    def _attention(self, x: str, index: int) -> tuple[str, Pullback]:
        """The residual stream after attention."""
        config, ops = self._config, self._ops
        at, widths = f"layers.{index}", self._widths()
        normed, pull_norm = self._norm(x, f"{at}.input_norm")
        modules = ("q_proj", "k_proj", "v_proj")
        parts, pull_projection = self._project(normed, index, "qkv", modules, widths)
        turns = []
        for j, (name, heads) in enumerate((("q", config.num_heads), ("k", config.num_kv_heads))):
            parts[j], turn = self._turn(parts[j], f"{at}.{name}_norm", heads, index)
            turns.append(turn)
        attended, pull_core = self._attend(parts, index)
        (update,), pull_out = self._project(
            attended, index, "o_proj", ("o_proj",), [config.hidden_size]
        )
        y, pull_update = self._add(x, update, f"{at}.post_attention_norm")

        def pull(gradient: str) -> str:
            grads = pull_core(pull_out([pull_update(gradient)], True))
            grads = [*(turn(g) for turn, g in zip(turns, grads, strict=False)), grads[2]]
            # Nothing below the first layer learns.
            into = pull_projection(grads, index > 0)
            return ops("Add", gradient, pull_norm(into)) if into else ""

        return y, pull

    def _widths(self) -> list[int]:
        config = self._config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        return [count * config.head_dim for count in heads]

    def _turn(self, x: str, norm: str, heads: int, index: int) -> tuple[str, Pullback]:
        """Queries or keys ``[batch, length, heads * dim]``, normed by head and rotated."""
        config, ops = self._config, self._ops
        pull_norm: Pullback | None = None
        if config.has_qk_norm:
            apart, pull_norm = self._norm(ops.reshape(x, 0, 0, heads, -1), norm)
            x = ops.reshape(apart, 0, 0, -1)
        is_local = config.layer_types[index] == "sliding" and config.local_rope is not None
        rope = "local_rope" if is_local else "rope"
        cos, sin = self._tables[rope]

        def pull(gradient: str) -> str:
            gradient = self._rotate(gradient, cos, f"{rope}.back")
            if pull_norm is None:
                return gradient
            return ops.reshape(pull_norm(ops.reshape(gradient, 0, 0, heads, -1)), 0, 0, -1)

        return self._rotate(x, cos, sin), pull

    def _rotate(self, x: str, cos: str, sin: str) -> str:
        tables = (self._ops.integers(0), cos, sin)
        return self._ops("RotaryEmbedding", x, *tables, domain="com.microsoft")

    def _attend(
        self, query_key_value: Sequence[str], index: int
    ) -> tuple[str, Callable[[str], list[str]]]:
        """Softmax attention, ``[batch, length, heads * dim]``; a group's queries are one matrix."""
        config, ops = self._config, self._ops
        groups, scale = config.num_kv_heads, float(config.attention_scale)
        is_sliding = config.layer_types[index] == "sliding"
        mask = self._mask(config.sliding_window if is_sliding else None)
        query, key, value = (
            self._to_groups(x, heads)
            for x, heads in zip(query_key_value, (config.num_heads, groups, groups), strict=True)
        )
        scores = ops.matmul(query, key, transpose_y=True, scale=scale)
        scores = ops("Add", ops.reshape(scores, 0, config.num_heads, -1, 0), mask)
        shares, pull_softmax = ops.softmax(scores)
        shares = ops.reshape(shares, 0, groups, -1, 0)
        attended = self._from_groups(ops.matmul(shares, value), config.num_heads)

        def pull(gradient: str) -> list[str]:
            grad = self._to_groups(gradient, config.num_heads)
            grad_shares = ops.matmul(grad, value, transpose_y=True)
            grad_shares = ops.reshape(grad_shares, 0, config.num_heads, -1, 0)
            grad_scores = ops.reshape(pull_softmax(grad_shares), 0, groups, -1, 0)
            return [
                self._from_groups(ops.matmul(grad_scores, key, scale=scale), config.num_heads),
                self._from_groups(
                    ops.matmul(grad_scores, query, transpose_x=True, scale=scale), groups
                ),
                self._from_groups(ops.matmul(shares, grad, transpose_x=True), groups),
            ]

        return attended, pull

    def _to_groups(self, x: str, heads: int) -> str:
        """``[batch, length, heads * dim]`` to ``[batch, kv_heads, queries * length, dim]``."""
        config, ops = self._config, self._ops
        apart = ops.reshape(x, 0, 0, heads, config.head_dim)
        turned = ops("Transpose", apart, perm=[0, 2, 1, 3])
        return ops.reshape(turned, 0, config.num_kv_heads, -1, config.head_dim)

    def _from_groups(self, x: str, heads: int) -> str:
        ops = self._ops
        turned = ops("Transpose", ops.reshape(x, 0, heads, -1, 0), perm=[0, 2, 1, 3])
        return ops.reshape(turned, 0, 0, -1)

    def _mlp(self, x: str, index: int) -> tuple[str, Pullback]:
        """The residual stream after the MLP."""
        config, ops = self._config, self._ops
        at, inner_size = f"layers.{index}", config.intermediate_size
        normed, pull_norm = self._norm(x, f"{at}.mlp_norm")
        (gate, up), pull_in = self._project(
            normed, index, "gate_up", ("gate_proj", "up_proj"), [inner_size] * 2
        )
        activate = ops.silu if config.activation == "silu" else ops.gelu_tanh
        active, pull_active = activate(gate)
        inner = ops("Mul", active, up)
        (update,), pull_out = self._project(
            inner, index, "down_proj", ("down_proj",), [config.hidden_size]
        )
        y, pull_update = self._add(x, update, f"{at}.post_mlp_norm")

        def pull(gradient: str) -> str:
            grad = pull_out([pull_update(gradient)], True)
            grads = [pull_active(ops("Mul", grad, up)), ops("Mul", grad, active)]
            return ops("Add", gradient, pull_norm(pull_in(grads, True)))

        return y, pull

    def _project(
        self, x: str, index: int, group: str, modules: Sequence[str], widths: Sequence[int]
    ) -> Projection:
        """Adapted projections of one input, whose weights are stored as one matrix."""
        ops, name = self._ops, f"layers.{index}.{group}"
        in_features = self._in_features(group)
        weight = self._weights.matrix(ops.graph, name, in_features)
        product = ops.matmul(x, weight, transpose_y=True)
        if self._weights.has(f"{name}.bias"):
            product = ops("Add", product, self._weights.plain(ops.graph, f"{name}.bias"))
        parts = ops.split_widths(product, widths)
        pulls: list[Callable[[str], str] | None] = [None] * len(parts)
        for j, (module, width) in enumerate(zip(modules, widths, strict=True)):
            if module in self._modules:
                delta, pulls[j] = self._branch(x, index, module, (in_features, width))
                parts[j] = ops("Add", parts[j], delta)

        def pull(gradients: Sequence[str], wants_input: bool) -> str:
            lows = [p(g) for p, g in zip(pulls, gradients, strict=True) if p is not None]
            if not wants_input:
                return ""
            whole = gradients[0] if len(gradients) == 1 else ops("Concat", *gradients, axis=-1)
            into = ops.matmul(whole, weight)
            for low in lows:
                into = ops("Add", into, low)
            return into

        return parts, pull

    def _branch(
        self, x: str, index: int, module: str, shape: tuple[int, int]
    ) -> tuple[str, Pullback]:
        """``x @ A @ B``; its pullback keeps the gradients of A and B."""
        ops, rank = self._ops, self._rank
        a, b = lora_name(index, module, "A"), lora_name(index, module, "B")
        low = ops.matmul(x, a)

        def pull(gradient: str) -> str:
            self.gradients[b] = ops.outer(low, gradient, (rank, shape[1]))
            grad_low = ops.matmul(gradient, b, transpose_y=True)
            self.gradients[a] = ops.outer(x, grad_low, (shape[0], rank))
            return ops.matmul(grad_low, a, transpose_y=True)

        return ops.matmul(low, b), pull

    def _in_features(self, group: str) -> int:
        config = self._config
        inner = {"o_proj": self._widths()[0], "down_proj": config.intermediate_size}
        return inner.get(group, config.hidden_size)

    def _add(self, x: str, update: str, norm: str) -> tuple[str, Pullback]:
        """`x` and an update, which is normed where the architecture has it so."""
        ops = self._ops
        if not self._config.has_sandwich_norms:
            return ops("Add", x, update), lambda gradient: gradient
        update, pull = self._norm(update, norm)
        return ops("Add", x, update), pull

    def _norm(self, x: str, name: str) -> tuple[str, Pullback]:
        weight = self._weights.plain(self._ops.graph, f"{name}.weight")
        return self._ops.norm(x, weight, self._config.norm_eps)
