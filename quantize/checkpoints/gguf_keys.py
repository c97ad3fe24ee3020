"""A decision about every key that describes a decoder in a GGUF file, as in `config_keys`."""

import logging
from typing import Any

from omnidraft_npu.documents import shown_text

from .config_fields import ConfigFields

logger = logging.getLogger(__name__)

_USED = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "expert_count",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
    }
)

_WITHOUT_EFFECT = frozenset(
    {
        "vocab_size",
        "tensor_data_layout",
        "features_length",
        # Of experts, whose number decides.
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_chunk_feed_forward_length",
        "expert_group_count",
        "expert_group_used_count",
        "expert_group_scale",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "experts_per_group",
        # Of norms and scalings of other kinds.
        "attention.layer_norm_epsilon",
        "attention.group_norm_epsilon",
        "attention.group_norm_groups",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        # Of a head that embeds, and of other models.
        "pooling_type",
        "embedding_length_out",
        "decoder_start_token_id",
        "decoder_block_count",
    }
)

_OFF: tuple[Any, ...] = (0,)
# Metadata that changes what is computed, and the values that leave it as it is.
_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "attention.scale",
            "attention.clamp_kqv",
            "attention.max_alibi_bias",
            "attention.temperature_scale",
            "attention.temperature_length",
            "attention.relative_buckets_count",
            "attention.kv_lora_rank",
            "attention.q_lora_rank",
            "attention.decay_lora_rank",
            "attention.iclr_lora_rank",
            "attention.gate_lora_rank",
            "attention.value_residual_mix_lora_rank",
            "attention.key_length_mla",
            "attention.value_length_mla",
            "attention.shared_kv_layers",
            "attention.output_gate",
            "rope.scaling.alpha",
            "use_parallel_residual",
            "leading_dense_block_count",
            "expert_shared_count",
            "moe_every_n_layers",
            "moe_latent_size",
            "interleave_moe_layer_step",
            "nextn_predict_layers",
            "n_deepstack_layers",
            "router_logit_softcapping",
            "swin_norm",
            "rescale_every_n_layers",
            "time_mix_extra_dim",
            "time_decay_extra_dim",
            "token_shift_count",
            "full_attention_interval",
            "activation_sparsity_scale",
            "altup.active_idx",
            "altup.num_inputs",
            "embedding_length_per_layer_input",
            "swiglu_clamp_exp",
            "swiglu_clamp_shexp",
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            "logit_scale",
            "residual_scale",
            "embedding_scale",
            "attention.output_scale",
            "rope.scaling.attn_factor",
        ),
        (0, 1),
    ),
    "attention.causal": (True,),
    "rope.dimension_sections": (),
}

_OF_SLIDING_LAYERS = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "rope.dimension_count_swa": "rope.dimension_count",
}


def check_metadata(fields: ConfigFields, prefix: str) -> None:
    """Refuse metadata that asks for another computation, and warn of what nobody knows.

    Args:
        fields: the metadata, its keys without `prefix`.
        prefix: the architecture and a dot.

    Raises:
        CheckpointError: a key has a value that changes what is computed.
    """
    for name, harmless in _REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise fields.unsupported(name, value, "a decoder with this factor or switch")
    for name, full in _OF_SLIDING_LAYERS.items():
        value = fields.get(name)
        if value is not None and value != fields.get(full, value):
            raise fields.unsupported(name, value, "another head in sliding layers")
    unknown = [name for name in fields if name.startswith(prefix)]
    if unknown:
        logger.warning("%s: not used: %s", fields.source, shown_text(", ".join(unknown), 300))


def decided_metadata() -> frozenset[str]:
    """Every key that is used, refused or without effect."""
    return _USED | _WITHOUT_EFFECT | _REFUSED.keys() | _OF_SLIDING_LAYERS.keys()
