"""Rotary fields of a `config.json`, in the form of transformers 4 or of transformers 5."""

from collections.abc import Mapping
from typing import Any

from omnidraft_npu.errors import CheckpointError

from ..architecture import Llama3Scaling, RopeConfig
from .config_fields import ConfigFields

_LAYER_KINDS = ("full_attention", "sliding_attention")


def rope_configs(fields: ConfigFields) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of the full layers, and of the sliding ones where it differs.

    transformers 4 has `rope_theta`, `rope_scaling` and, for gemma3, `rope_local_base_freq`
    (never scaled); transformers 5 has `rope_parameters`, possibly one for each kind of layer.

    Raises:
        CheckpointError: a kind of scaling is not supported, or its parameters are missing.
    """
    is_gemma = fields.get("model_type") == "gemma3_text"
    scaling = dict(fields.section("rope_scaling"))
    parameters = dict(fields.section("rope_parameters"))
    theta = fields.number("rope_theta", 1_000_000.0 if is_gemma else 10_000.0)
    if is_gemma or any(kind in parameters for kind in _LAYER_KINDS):
        if parameters and not any(kind in parameters for kind in _LAYER_KINDS):
            raise fields.unsupported(
                "rope_parameters", parameters, "one rotary embedding for all layers of gemma3"
            )
        local_theta = fields.number("rope_local_base_freq", 10_000.0 if is_gemma else theta)
        of_kinds = ConfigFields(parameters, f"{fields.source}: rope_parameters")
        full = dict(of_kinds.section("full_attention")) | scaling
        local = _rope(fields, of_kinds.section("sliding_attention"), local_theta)
        rope = _rope(fields, full, theta)
        return rope, None if local == rope else local
    return _rope(fields, parameters | scaling, theta), None


def _rope(fields: ConfigFields, parameters: Mapping[str, Any], theta: float) -> RopeConfig:
    """One set of rotary parameters; `theta` is the base where they do not name one."""
    own = ConfigFields(parameters, f"{fields.source}: rope parameters")
    for part in (own.get("partial_rotary_factor"), fields.get("partial_rotary_factor")):
        if part not in (None, 1):
            raise fields.unsupported(
                "partial_rotary_factor", part, "rotary on a part of the head only"
            )
    base = own.number("rope_theta", theta)
    match own.get("rope_type", own.get("type", "default")):
        case "default" if "mrope_section" not in parameters:
            return RopeConfig(base=base)
        case "linear":
            return RopeConfig(base=base, linear_factor=own.number("factor"))
        case "llama3":
            return RopeConfig(base=base, llama3=_llama3(own, fields))
        case kind:
            raise fields.unsupported("rope_type", kind, "rotary scaling but linear and llama3")


def _llama3(own: ConfigFields, fields: ConfigFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=own.number("factor"),
        low_freq_factor=own.number("low_freq_factor"),
        high_freq_factor=own.number("high_freq_factor"),
        original_context_length=own.count(
            "original_max_position_embeddings", fields.get("max_position_embeddings")
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{own.source}: high_freq_factor {scaling.high_freq_factor} must be above "
            f"low_freq_factor {scaling.low_freq_factor}; get the file again"
        )
    return scaling
