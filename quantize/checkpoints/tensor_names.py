"""What Hugging Face folders and GGUF files call the tensors of `DecoderConfig.tensor_shapes`."""

_HUGGING_FACE = {
    "embed_tokens": "embed_tokens.weight",
    "final_norm": "norm.weight",
    "input_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}

# With four norms a layer, `post_attention_layernorm` is another norm than it is with two.
_HUGGING_FACE_SANDWICH = _HUGGING_FACE | {
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}

_GGUF = {
    "embed_tokens": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "input_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}


def hugging_face_name(name: str, *, has_sandwich_norms: bool) -> str:
    """Name inside the decoder's own module, `layers.0.mlp.up_proj.weight` for example.

    The head lies outside of that module and has no name here.
    """
    layer, leaf = _split(name)
    names = _HUGGING_FACE_SANDWICH if has_sandwich_norms else _HUGGING_FACE
    return names[leaf] if layer is None else f"layers.{layer}.{names[leaf]}"


def gguf_name(name: str) -> str:
    """Name in a GGUF file, `blk.0.ffn_up.weight` for example."""
    layer, leaf = _split(name)
    return _GGUF[leaf] if layer is None else f"blk.{layer}.{_GGUF[leaf]}"


def _split(name: str) -> tuple[str | None, str]:
    """Number of the layer, None outside of the layers, and the name in there."""
    if not name.startswith("layers."):
        return None, name
    _, layer, leaf = name.split(".")
    return layer, leaf
