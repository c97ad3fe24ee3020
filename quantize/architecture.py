"""One description for every supported decoder; graph builders read nothing else.

A flavour (CPU, HTP) turns a `DecoderConfig` and its tensors into a graph; a
checkpoint reader turns a file into both. Neither knows the other.
"""

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
LayerType = Literal["full", "sliding"]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Frequency-dependent stretching of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, half-split (Hugging Face) layout."""

    base: float
    linear_factor: float = 1.0
    """Positions are divided by this."""
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and variant of a decoder-only transformer."""

    architecture: str
    """llama, mistral, qwen2, qwen3 or gemma3_text; for people, builders look at the fields."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_logits: int
    """Rows of the embedding and the head, padding included."""
    context_length: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    """Rotary embedding of the sliding layers, where it differs."""
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    """Tokens a sliding layer sees, the current one included."""
    attention_scale: float
    activation: Activation = "silu"
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    """Four norms a layer (Gemma 3): the outputs of attention and MLP are normed too."""
    embedding_scale: float = 1.0
    has_tied_head: bool = False

    @property
    def num_weights(self) -> int:
        """Elements of all tensors; a tied head counts once."""
        return sum(map(math.prod, self.tensor_shapes().values()))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint of this shape holds, by canonical name.

        Projections are ``[out, in]``; norm weights are the factor that is really applied
        (Gemma's ``1 + w`` is already added); rotary layout is half-split.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (self.num_logits, hidden)}
        for i in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_norm": (hidden,),
                "q_proj": (q, hidden),
                "k_proj": (kv, hidden),
                "v_proj": (kv, hidden),
                "o_proj": (hidden, q),
                "mlp_norm": (hidden,),
                "gate_proj": (inner, hidden),
                "up_proj": (inner, hidden),
                "down_proj": (hidden, inner),
            }
            if self.has_qkv_bias:
                layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
            if self.has_output_bias:
                layer["o_bias"] = (hidden,)
            if self.has_mlp_bias:
                layer |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
            if self.has_qk_norm:
                layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            if self.has_sandwich_norms:
                layer |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["final_norm"] = (hidden,)
        if not self.has_tied_head:
            shapes["lm_head"] = (self.num_logits, hidden)
        return shapes
