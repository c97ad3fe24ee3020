"""A llama in torch: the drafter under training."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..architecture import DecoderConfig


class Norm(nn.Module):
    """Root mean square norm with a weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size]`` to the same shape and type."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self._eps)
        return (y * self.weight).to(x.dtype)


class Layer(nn.Module):
    """Attention with grouped keys, then a gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim
        self.scale = config.attention_scale
        self.input_norm = Norm(hidden, config.norm_eps)
        self.mlp_norm = Norm(hidden, config.norm_eps)
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """``[batch, length, hidden]`` to the same shape."""
        batch, length, _ = x.shape
        y = self.input_norm(x)
        q = self.q_proj(y).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(y).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(y).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, angles), rotate(k, angles)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        x = x + self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x)
        added: Tensor = self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))
        return x + added


class Llama(nn.Module):
    """Token ids to hidden states, and hidden states to logits through the embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.num_logits, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = Norm(config.hidden_size, config.norm_eps)
        self._frequencies: Tensor
        self.register_buffer("_frequencies", inverse_frequencies(config), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``[batch, length]`` ids to ``[batch, length, hidden]`` normed states.

        Every row begins at position 0 and may be padded at its end.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        angles = positions[:, None] * self._frequencies
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, angles)
        normed: Tensor = self.final_norm(x)
        return normed

    def logits(self, states: Tensor) -> Tensor:
        """``[..., hidden]`` normed states to ``[..., vocab]`` logits."""
        return functional.linear(states, self.embed_tokens.weight)


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """``[dim / 2]`` angle that each pair of a head turns by from one position to the next."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    return config.rope.base**-exponents / config.rope.linear_factor


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions on ``[..., dim]`` by ``[..., dim / 2]`` angles, half-split layout."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def canonical_name(parameter: str) -> str:
    """`layers.0.q_proj` for `layers.0.q_proj.weight`."""
    return parameter.removesuffix(".weight")
