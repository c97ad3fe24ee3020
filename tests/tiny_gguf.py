"""GGUF files of tiny models, written with llama.cpp's conventions by the `gguf` package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_LEAVES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path, model: Any, encoding: str = "F32", metadata: Mapping[str, Any] | None = None
) -> Path:
    """`model` (of transformers) as a GGUF file, its matrices in `encoding`.

    Args:
        metadata: further keys, or others for the usual ones; text and whole numbers.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = model.config
    is_gemma = config.model_type == "gemma3_text"
    family = "gemma3" if is_gemma else _FAMILIES[config.model_type]
    writer = GGUFWriter(path, family)
    _add_shape(writer, config)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    kind = GGMLQuantizationType[encoding]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            values = _interleaved(
                values, config.num_attention_heads if is_query else config.num_key_value_heads
            )
        if is_gemma and name.endswith("norm.weight"):
            values = values + 1
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name, is_gemma), values)
        else:
            packed = quants.quantize(values, kind)
            writer.add_tensor(_gguf_name(name, is_gemma), packed, raw_dtype=kind)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(rope, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type in ("gemma3_text", "mistral") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if rope.get("rope_type") == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])


def _interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i and row i + d/2 of every head as neighbours, spelled out row by row."""
    head_dim = len(values) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(values[order])


def _frequency_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What llama 3 divides each rotary frequency by, one frequency at a time."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        context = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _gguf_name(name: str, is_gemma: bool) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, leaf = stem.split(".", 3)
    leaves = _LEAVES | (_FOUR_NORMS if is_gemma else _TWO_NORMS)
    return f"blk.{layer}.{leaves[leaf]}.{kind}"
