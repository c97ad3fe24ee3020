"""The target as it writes: fused projections, one cache for a batch of rows of any lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..architecture import DecoderConfig
from ..checkpoints.checkpoint import Checkpoint
from .llama import inverse_frequencies, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, queries ``[n, heads, dim]``, keys and values ``[n, kv_heads, dim]`` to ``[n, hidden]``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class RowCaches:
    """Keys and values of every layer for a number of rows."""

    def __init__(self, config: DecoderConfig, num_rows: int, num_slots: int, like: Tensor) -> None:
        """Room for `num_slots` tokens in each row, of the type and on the device of `like`."""
        shape = num_rows, config.num_kv_heads, _rounded_up(num_slots), config.head_dim
        layers = range(config.num_layers)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in layers]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        for tensors in (self.keys, self.values):
            tensors[:] = [tensor[list(rows)] for tensor in tensors]


class TeacherModel:
    """A plain llama for inference: weights in one type, residuals in float32."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config = checkpoint.config

        def weight(*names: str) -> Tensor:
            joined = np.concatenate([checkpoint.tensor(name) for name in names])
            return torch.from_numpy(joined).to(device, dtype)

        def norm(name: str) -> Tensor:
            return torch.from_numpy(checkpoint.tensor(name)).to(device)

        self.embedding = weight("embed_tokens")
        self._final_norm = norm("final_norm")
        self._layers = [
            _Layer(
                input_norm=norm(f"{at}.input_norm"),
                qkv=weight(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
                out=weight(f"{at}.o_proj"),
                mlp_norm=norm(f"{at}.mlp_norm"),
                gate_up=weight(f"{at}.gate_proj", f"{at}.up_proj"),
                down=weight(f"{at}.down_proj"),
            )
            for at in (f"layers.{i}" for i in range(config.num_layers))
        ]
        self._frequencies = inverse_frequencies(config).to(device)

    def new_caches(self, num_rows: int, num_slots: int) -> RowCaches:
        """Empty caches for so many rows of at most so many tokens."""
        return RowCaches(self.config, num_rows, num_slots, self.embedding)

    def read(self, ids: Tensor, caches: RowCaches | None = None, row: int = 0) -> Tensor:
        """``[length, hidden]`` float32 states of a text; a row of the caches then holds it."""
        length, group = len(ids), self.config.num_heads // self.config.num_kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
            if caches is not None:
                caches.keys[layer][row, :, :length] = keys
                caches.values[layer][row, :, :length] = values
            attended = functional.scaled_dot_product_attention(
                q.reshape(length, -1, group, q.shape[-1]).permute(1, 2, 0, 3),
                keys[:, None].expand(-1, group, -1, -1),
                values[:, None].expand(-1, group, -1, -1),
                is_causal=True,
                scale=self.config.attention_scale,
            )
            return attended.permute(2, 0, 1, 3).flatten(1)

        return self._states(ids, torch.arange(length, device=ids.device), attend)

    def step(self, ids: Tensor, lengths: Tensor, longest: int, caches: RowCaches) -> Tensor:
        """``[rows, hidden]`` float32 states after one more token of each row.

        Args:
            ids: ``[rows]`` the tokens.
            lengths: ``[rows]`` tokens that each row holds already.
            longest: The greatest of `lengths`, known without asking the device.
            caches: Are extended.
        """
        rows = torch.arange(len(ids), device=ids.device)
        group = self.config.num_heads // self.config.num_kv_heads
        # Kernels of GPUs want masks of multiples of 8.
        end = _rounded_up(longest + 1)
        is_hidden = torch.arange(end, device=ids.device) > lengths[:, None]
        # The queries that share a key stand where a text's positions would: no key is copied.
        mask = torch.zeros(is_hidden.shape, dtype=self.embedding.dtype, device=ids.device)
        mask = mask.masked_fill_(is_hidden, -torch.inf)[:, None, None]
        mask = mask.expand(-1, self.config.num_kv_heads, group, -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = caches.keys[layer], caches.values[layer]
            keys[rows, :, lengths] = k
            values[rows, :, lengths] = v
            attended = functional.scaled_dot_product_attention(
                q.reshape(len(q), -1, group, q.shape[-1]),
                keys[:, :, :end],
                values[:, :, :end],
                mask,
                scale=self.config.attention_scale,
            )
            return attended.flatten(1)

        return self._states(ids, lengths, attend)

    def _states(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        config, dtype = self.config, self.embedding.dtype
        heads, kv_heads = config.num_heads, config.num_kv_heads
        angles = positions[:, None, None] * self._frequencies
        x = self.embedding[ids].float()
        for i, layer in enumerate(self._layers):
            y = functional.linear(self._normed(x, layer.input_norm).to(dtype), layer.qkv)
            y = y.view(len(ids), -1, config.head_dim)
            turned = rotate(y[:, : heads + kv_heads], angles)
            attended = attend(i, turned[:, :heads], turned[:, heads:], y[:, heads + kv_heads :])
            x = x + functional.linear(attended, layer.out)
            y = functional.linear(self._normed(x, layer.mlp_norm).to(dtype), layer.gate_up)
            gate, up = y.chunk(2, dim=1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return self._normed(x, self._final_norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _rounded_up(num_slots: int) -> int:
    return -(-num_slots // 8) * 8
