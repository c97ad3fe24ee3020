"""A decision about every key of a `config.json`: used, without effect, or refused.

A key that changes what a decoder computes and is overlooked gives wrong numbers without a word.
A test reads the configuration classes of the installed transformers and fails for a key that is
in none of these tables.
"""

import logging
from collections.abc import Iterator
from typing import Any

from omnidraft_npu.documents import shown_text

from .config_fields import ConfigFields

logger = logging.getLogger(__name__)

ROPE_KEYS = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)

_USED = ROPE_KEYS | {
    "architectures",
    "model_type",
    "text_config",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "layer_types",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}

# Keys that only some families read, as transformers does.
_USED_BY: dict[str, frozenset[str]] = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "mistral": frozenset({"sliding_window"}),
    "qwen2": frozenset({"use_sliding_window", "sliding_window", "max_window_layers"}),
    "qwen3": frozenset(
        {"attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"}
    ),
    "gemma3_text": frozenset(
        {
            "attention_bias",
            "hidden_activation",
            "query_pre_attn_scalar",
            "sliding_window",
            "sliding_window_pattern",
        }
    ),
}

_WITHOUT_EFFECT = frozenset(
    {
        # Of the file, of training and of what a call in Python returns.
        "transformers_version",
        "transformers.js_config",
        "name_or_path",
        "dtype",
        "torch_dtype",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        "cache_implementation",
        "return_dict",
        "use_return_dict",
        "output_hidden_states",
        "output_attentions",
        "tie_last_hidden_states",
        "attn_implementation",
        "experts_implementation",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "initializer_range",
        "initializer_factor",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "gradient_checkpointing",
        "use_flash_attn",
        "is_llama_config",
        "max_sequence_length",
        "tokenizer_class",
        "prefix",
        "task_specific_params",
        "is_decoder",
        "sep_token_id",
        "decoder_start_token_id",
        # Of a head that classifies.
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "classifier_dropout",
        # Of the parts of gemma3 that are not text.
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        # Of generation; transformers reads `generation_config.json` for them.
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "epsilon_cutoff",
        "eta_cutoff",
        "encoder_repetition_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "num_beam_groups",
        "diversity_penalty",
    }
)

_OFF = (None, False, 0)
_ONE = (None, 1)
_EMPTY: tuple[Any, ...] = (None, False, 0, [], {}, ())

# Keys that change what is computed: what they ask for, and the values that ask for nothing.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "n_shared_experts",
            "num_shared_experts",
            "moe_intermediate_size",
            "moe_num_experts",
            "first_k_dense_replace",
        ),
        ("a mixture of experts", _OFF),
    ),
    "attn_logit_softcapping": ("softcapping of attention scores", _OFF),
    "final_logit_softcapping": ("softcapping of logits", _OFF),
    "logit_softcapping": ("softcapping of logits", _OFF),
    "use_bidirectional_attention": ("attention that is not causal", _OFF),
    "is_causal": ("attention that is not causal", (None, True)),
    "is_encoder_decoder": ("an encoder with a decoder", _OFF),
    "tie_encoder_decoder": ("an encoder with a decoder", _OFF),
    "add_cross_attention": ("cross-attention", _OFF),
    "cross_attention_hidden_size": ("cross-attention", _OFF),
    "cross_attention_layers": ("cross-attention", _EMPTY),
    "pruned_heads": ("a set of pruned heads", _EMPTY),
    "per_layer_config": ("a configuration for each layer", _EMPTY),
    "block_configs": ("a configuration for each layer", _EMPTY),
    "use_mrope": ("multimodal rotary positions", _OFF),
    "no_rope_layers": ("layers without rotary embedding", _EMPTY),
    "no_rope_layer_interval": ("layers without rotary embedding", _OFF),
    "nope_layer_interval": ("layers without rotary embedding", _OFF),
    **dict.fromkeys(
        ("use_rope", "use_rotary_embeddings"), ("a decoder without rotary embedding", (None, True))
    ),
    **dict.fromkeys(
        ("rope_interleave", "rope_interleaved", "is_rope_interleaved"),
        ("an interleaved rotary embedding", _OFF),
    ),
    "rope_is_neox_style": ("an interleaved rotary embedding", (None, True)),
    **dict.fromkeys(
        ("rotary_pct", "rotary_percent", "rope_percent", "rope_pct"),
        ("rotary on a part of the head only", _ONE),
    ),
    "rope_ratio": ("another kind of rotary scaling", _ONE),
    **dict.fromkeys(
        ("use_dynamic_ntk", "use_logn_attn"), ("scaling by the length of the text", _OFF)
    ),
    "alibi": ("attention with linear biases", _OFF),
    "attention_chunk_size": ("attention in chunks", _OFF),
    "attn_temperature_tuning": ("tuning of the attention temperature", _OFF),
    "attention_sink": ("attention sinks", _OFF),
    "attn_output_gate": ("gated attention", _OFF),
    **dict.fromkeys(
        ("attention_multiplier", "attn_scale", "attention_scale"),
        ("an attention scale of its own", (None,)),
    ),
    "query_pre_attn_scalar": ("an attention scale of its own", (None,)),
    "scale_attn_weights": ("attention without a scale", (None, True)),
    "scale_attn_by_inverse_layer_idx": ("an attention scale for each layer", _OFF),
    **dict.fromkeys(
        ("embedding_multiplier", "embedding_scale", "scale_emb", "emb_scale"),
        ("a factor on the embedding", _ONE),
    ),
    **dict.fromkeys(
        ("scale_embedding", "scale_embeddings", "normalize_embedding"),
        ("a factor on the embedding", _OFF),
    ),
    **dict.fromkeys(
        ("residual_multiplier", "residual_scale", "scale_depth"), ("a factor on residuals", _ONE)
    ),
    **dict.fromkeys(
        ("logit_scale", "logits_scale", "logits_scaling", "lm_head_multiplier", "output_scale"),
        ("a factor on logits", _ONE),
    ),
    **dict.fromkeys(
        ("mup_width_multiplier", "mup_embeddings_scale", "mup_output_alpha", "width_scale"),
        ("a decoder with such factors", _ONE),
    ),
    "dim_model_base": ("a factor on logits", (None,)),
    **dict.fromkeys(
        ("qk_norm", "use_qk_norm", "qk_layernorm", "query_key_norm"),
        ("a norm of queries and keys", _OFF),
    ),
    **dict.fromkeys(("clip_qkv", "clamp_kqv"), ("clamping of projections", _OFF)),
    **dict.fromkeys(
        ("use_parallel_residual", "parallel_attn", "parallel_attn_mlp_res"),
        ("attention beside the MLP", _OFF),
    ),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "num_kv_shared_layers", "kv_sharing"),
        ("attention of another kind", _EMPTY),
    ),
    "sliding_window_pattern": ("a pattern of sliding layers", _OFF),
    **dict.fromkeys(
        ("quantization", "quantization_config", "compression_config"),
        ("a checkpoint that is already quantised", _EMPTY),
    ),
}

_QUANTISED = ("quantization", "quantization_config", "compression_config")


def check_keys(fields: ConfigFields, family: str) -> None:
    """Refuse keys that ask for another computation, and warn of those that nobody knows.

    Raises:
        CheckpointError: a key has a value that changes what is computed.
    """
    used = _USED | _USED_BY[family]
    for name in (*_QUANTISED, *_REFUSED):
        if name in used:
            continue
        meaning, neutral = _REFUSED[name]
        value = fields.get(name)
        if not _is_any_of(value, neutral):
            way = "use the original one" if name in _QUANTISED else None
            raise fields.unsupported(name, value, meaning, other_way=way)
    ignored = sorted(_unknown(fields, used))
    if ignored:
        shown = shown_text(", ".join(ignored[:6]), 300) + (
            f" and {len(ignored) - 6} more" if ignored[6:] else ""
        )
        logger.warning(
            "%s: not used for a %s model, by transformers either: %s", fields.source, family, shown
        )


def decided_keys(family: str) -> frozenset[str]:
    """Every key that is used, refused or without effect in a family."""
    return _USED | _USED_BY[family] | _WITHOUT_EFFECT | _REFUSED.keys()


def _unknown(fields: ConfigFields, used: frozenset[str]) -> Iterator[str]:
    for name in fields:
        is_known = name in used or name in _WITHOUT_EFFECT or name in _REFUSED
        if not is_known and not name.startswith("_") and not _is_any_of(fields.get(name), _EMPTY):
            yield name


def _is_any_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value equals one of some; true and 1 are different, 1 and 1.0 are not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
