"""A decoder of any supported architecture as a function of its LoRA tensors, in torch."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from omnidraft_npu.lora import lora_name

from ..architecture import DecoderConfig
from ..rotary import rotary_tables

Tensors = Mapping[str, Tensor]

_HIDDEN = -1e9


class LoraDecoder:
    """The forward pass over whole rows; weights and LoRA tensors are arguments."""

    def __init__(self, config: DecoderConfig, length: int) -> None:
        """Prepare what does not change.

        Args:
            config: Of the model.
            length: Pieces of a row.
        """
        self._config = config
        self._masks = {kind: _mask(config, kind, length) for kind in set(config.layer_types)}
        self._rotations = {}
        for kind in set(config.layer_types):
            rope = config.local_rope if kind == "sliding" and config.local_rope else config.rope
            tables = rotary_tables(rope, config.head_dim, length)
            self._rotations[kind] = tuple(torch.from_numpy(table) for table in tables)

    def states(self, weights: Tensors, lora: Tensors, pieces: Tensor) -> Tensor:
        """Normed hidden states.

        Args:
            weights: By canonical name (`DecoderConfig.tensor_shapes`).
            lora: By graph input (`omnidraft_npu.lora.lora_name`).
            pieces: ``[batch, length]``; a row may be padded at its end.

        Returns:
            ``[batch, length, hidden]``.
        """
        config = self._config
        x = functional.embedding(pieces, weights["embed_tokens"]) * config.embedding_scale
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            layer = {
                name.removeprefix(prefix): w
                for name, w in weights.items()
                if name.startswith(prefix)
            }
            project = _Projections(i, layer, lora)
            update = self._attention(self._norm(x, layer["input_norm"]), i, layer, project)
            x = x + self._update(update, layer.get("post_attention_norm"))
            update = self._mlp(self._norm(x, layer["mlp_norm"]), project)
            x = x + self._update(update, layer.get("post_mlp_norm"))
        return self._norm(x, weights["final_norm"])

    def logits(self, weights: Tensors, states: Tensor) -> Tensor:
        """``[..., hidden]`` normed states to ``[..., num_logits]``."""
        head = "embed_tokens" if self._config.has_tied_head else "lm_head"
        return states @ weights[head].T

    def _attention(self, x: Tensor, index: int, layer: Tensors, project: "_Projections") -> Tensor:
        config, kind = self._config, self._config.layer_types[index]
        dim, groups = config.head_dim, config.num_kv_heads
        query = _heads(project(x, "q_proj"), config.num_heads, dim)
        key = _heads(project(x, "k_proj"), groups, dim)
        value = _heads(project(x, "v_proj"), groups, dim)
        if config.has_qk_norm:
            query = self._norm(query, layer["q_norm"])
            key = self._norm(key, layer["k_norm"])
        query, key = (_rotate(t, *self._rotations[kind]) for t in (query, key))
        batch, heads, length, _ = query.shape
        query = query.reshape(batch, groups, heads // groups, length, dim)
        scores = query @ key[:, :, None].transpose(-1, -2) * config.attention_scale
        attended = (scores + self._masks[kind]).softmax(-1) @ value[:, :, None]
        attended = attended.reshape(batch, heads, length, dim).transpose(1, 2)
        return project(attended.reshape(batch, length, heads * dim), "o_proj")

    def _mlp(self, x: Tensor, project: "_Projections") -> Tensor:
        gate, up = project(x, "gate_proj"), project(x, "up_proj")
        if self._config.activation == "silu":
            active = gate * torch.sigmoid(gate)
        else:
            active = functional.gelu(gate, approximate="tanh")
        return project(active * up, "down_proj")

    def _update(self, update: Tensor, norm: Tensor | None) -> Tensor:
        return update if norm is None else self._norm(update, norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self._config.norm_eps) * weight


class _Projections:
    """The projections of one layer with their biases and LoRA branches."""

    def __init__(self, index: int, layer: Tensors, lora: Tensors) -> None:
        self._index, self._layer, self._lora = index, layer, lora

    def __call__(self, x: Tensor, module: str) -> Tensor:
        y = x @ self._layer[module].T
        bias = self._layer.get(module.replace("_proj", "_bias"))
        if bias is not None:
            y = y + bias
        a = self._lora.get(lora_name(self._index, module, "A"))
        if a is not None:
            y = y + x @ a @ self._lora[lora_name(self._index, module, "B")]
        return y


def _mask(config: DecoderConfig, kind: str, length: int) -> Tensor:
    row, column = np.ogrid[:length, :length]
    window = config.sliding_window if kind == "sliding" and config.sliding_window else length
    is_seen = (column <= row) & (row - column < window)
    return torch.from_numpy(np.where(is_seen, 0, _HIDDEN).astype(np.float32))


def _heads(x: Tensor, heads: int, dim: int) -> Tensor:
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, dim).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
