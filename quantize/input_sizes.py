"""How large the inputs of every projection are, found by running random tokens.

Rounding a weight costs in proportion to the mean square of the input it multiplies. Some
channels of a trained model are tens of times larger than the rest, whatever the text, so
random tokens show them nearly as well as text does, and no text or tokenizer is needed.
The run goes layer by layer, with the tensors the graph builder has in hand anyway. Given
ids of text instead, it is also the way that calibrated rounding takes through a model.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from .architecture import DecoderConfig, RopeConfig
from .rotary import rotary_tables

Floats = npt.NDArray[np.float32]
Revise = Callable[[str, Floats, Mapping[str, Floats]], Mapping[str, Floats]]
"""Told, before each product, its name, its ``[sequences, length, in]`` input and the layer's
tensors; gives the tensors to go on with."""

_SEQUENCES = 2
_LENGTH = 256


class RandomTokens:
    """Hidden states of a few sequences, random ones if none are given, through a decoder."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Floats,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._config = config
        length = min(_LENGTH, config.context_length)
        random = np.random.default_rng(0)
        self.ids = random.integers(0, len(embedding), (_SEQUENCES, length)) if ids is None else ids
        self._hidden = embedding[self.ids] * np.float32(config.embedding_scale)
        self._rotary: dict[RopeConfig, tuple[Floats, Floats]] = {}

    def layer(self, index: int, tensors: Mapping[str, Floats]) -> dict[str, Floats]:
        """Go through one layer.

        Args:
            index: of the layer.
            tensors: of the layer, by canonical name without its ``layers.{index}.`` part.

        Returns:
            ``[in]`` mean squares of the inputs of `qkv`, `o`, `gate_up` and `down`.
        """
        sizes: dict[str, Floats] = {}

        def measure(name: str, x: Floats, layer: Mapping[str, Floats]) -> Mapping[str, Floats]:
            sizes[name] = _mean_square(x)
            return layer

        self.revise_layer(index, tensors, measure)
        return sizes

    def revise_layer(self, index: int, tensors: Mapping[str, Floats], revise: Revise) -> None:
        """Go through one layer, whose tensors `revise` may replace as their inputs are known."""
        config = self._config
        x = self._norm(self._hidden, tensors["input_norm"])
        tensors = revise("qkv", x, tensors)
        attended = self._attend(x, index, tensors)
        tensors = revise("o", attended, tensors)
        update = _project(attended, tensors, "o")
        if config.has_sandwich_norms:
            update = self._norm(update, tensors["post_attention_norm"])
        self._hidden += update
        y = self._norm(self._hidden, tensors["mlp_norm"])
        tensors = revise("gate_up", y, tensors)
        inner = self._activate(_project(y, tensors, "gate")) * _project(y, tensors, "up")
        tensors = revise("down", inner, tensors)
        update = _project(inner, tensors, "down")
        if config.has_sandwich_norms:
            update = self._norm(update, tensors["post_mlp_norm"])
        self._hidden += update

    def head(self, final_norm: Floats) -> Floats:
        """``[hidden]`` mean squares of the head's input."""
        return _mean_square(self.head_input(final_norm))

    def head_input(self, final_norm: Floats) -> Floats:
        """``[sequences, length, hidden]`` input of the head."""
        return self._norm(self._hidden, final_norm)

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        normed: Floats = x / np.sqrt(mean + np.float32(self._config.norm_eps)) * weight
        return normed

    def _attend(self, x: Floats, index: int, tensors: Mapping[str, Floats]) -> Floats:
        config = self._config
        q, k, v = (
            _project(x, tensors, part).reshape(*x.shape[:2], heads, config.head_dim)
            for part, heads in zip(
                "qkv", (config.num_heads, config.num_kv_heads, config.num_kv_heads), strict=True
            )
        )
        if config.has_qk_norm:
            q, k = self._norm(q, tensors["q_norm"]), self._norm(k, tensors["k_norm"])
        is_sliding = config.layer_types[index] == "sliding"
        rope = config.local_rope if is_sliding and config.local_rope else config.rope
        q, k = self._rotate(q, rope), self._rotate(k, rope)
        distance = np.subtract.outer(np.arange(x.shape[1]), np.arange(x.shape[1]))
        window = config.sliding_window if is_sliding and config.sliding_window else x.shape[1]
        is_seen = (distance >= 0) & (distance < window)
        mask = np.where(is_seen, np.float32(0), np.float32(-1e30))
        attended = np.empty_like(q)
        for i in range(len(x)):
            attended[i] = self._attend_one(q[i], k[i], v[i], mask)
        return attended.reshape(*x.shape[:2], -1)

    def _attend_one(self, q: Floats, k: Floats, v: Floats, mask: Floats) -> Floats:
        """``[length, heads, dim]`` of one sequence: the weights of many take gigabytes."""
        group = self._config.num_heads // self._config.num_kv_heads
        q = q.reshape(len(q), -1, group, q.shape[-1]).transpose(1, 2, 0, 3)
        weights: Floats = q @ k.transpose(1, 2, 0)[:, None]
        weights *= np.float32(self._config.attention_scale)
        weights += mask
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        rows: Floats = weights @ v.transpose(1, 0, 2)[:, None]
        return rows.transpose(2, 0, 1, 3).reshape(len(mask), -1, v.shape[-1])

    def _rotate(self, x: Floats, rope: RopeConfig) -> Floats:
        if rope not in self._rotary:
            self._rotary[rope] = rotary_tables(rope, self._config.head_dim, x.shape[1])
        cos, sin = (table[None, :, None, :] for table in self._rotary[rope])
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _activate(self, x: Floats) -> Floats:
        if self._config.activation == "silu":
            active: Floats = x / (1 + np.exp(-np.clip(x, -80, None)))
        else:
            inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
            active = np.float32(0.5) * x * (1 + np.tanh(inner))
        return active


def _project(x: Floats, tensors: Mapping[str, Floats], part: str) -> Floats:
    projected = x @ tensors[f"{part}_proj"].T
    bias = tensors.get(f"{part}_bias")
    return projected if bias is None else projected + bias


def _mean_square(x: Floats) -> Floats:
    mean: Floats = np.square(x, dtype=np.float32).reshape(-1, x.shape[-1]).mean(axis=0)
    return mean
