"""Rotary fields of a `config.json`, in the form of transformers 4 or of transformers 5."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from omnidraft_npu.errors import CheckpointError

from ..architecture import Llama3Scaling, RopeConfig
from ..rotary import rotary_tables
from .config_fields import ConfigFields

_LAYER_KINDS = ("full_attention", "sliding_attention")
_OUTER_LENGTH = "original_max_position_embeddings"


def rope_configs(fields: ConfigFields, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of the full layers, and of the sliding ones where it differs.

    transformers 4 has `rope_theta`, `rope_scaling` and, for gemma3, `rope_local_base_freq`
    (never scaled); transformers 5 has `rope_parameters`, for gemma3 one for each kind of layer.
    Where a file has both, they have the priority that transformers 5 gives them.

    Raises:
        CheckpointError: a kind of scaling is not supported, or its parameters are missing.
    """
    if fields.get("model_type") == "gemma3_text":
        return _gemma3(fields, head_dim)
    parameters = fields.section("rope_scaling") or fields.section("rope_parameters")
    if any(kind in parameters for kind in _LAYER_KINDS):
        raise fields.unsupported(
            "rope_parameters", dict(parameters), "a rotary embedding for each kind of layer"
        )
    theta = fields.number("rope_theta", 10_000.0)
    return _rope(fields, parameters, theta, head_dim, fields.get(_OUTER_LENGTH)), None


def _gemma3(fields: ConfigFields, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """One for each kind of layer; `rope_scaling` is for the full ones."""
    parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    if parameters and not any(kind in parameters for kind in _LAYER_KINDS):
        raise fields.unsupported(
            "rope_parameters", dict(parameters), "one rotary embedding for all layers of gemma3"
        )
    if "type" in scaling and scaling["type"] != scaling.get("rope_type", "default"):
        raise fields.unsupported(
            "rope_scaling", dict(scaling), "a type that only some versions of transformers read"
        )
    of_kinds = ConfigFields(parameters, f"{fields.source}: rope_parameters")
    full = dict(of_kinds.section("full_attention")) | dict(scaling)
    rope = _rope(fields, full, fields.number("rope_theta", 1_000_000.0), head_dim)
    sliding = of_kinds.section("sliding_attention")
    local = _rope(fields, sliding, fields.number("rope_local_base_freq", 10_000.0), head_dim)
    return rope, None if local == rope else local


def _rope(
    fields: ConfigFields,
    parameters: Mapping[str, Any],
    theta: float,
    head_dim: int,
    outer_length: Any = None,
) -> RopeConfig:
    """One set of rotary parameters.

    Args:
        fields: the whole document.
        parameters: the set.
        theta: base where the set does not name one.
        head_dim: channels of a head.
        outer_length: `original_max_position_embeddings` outside of the set, which goes first.
    """
    own = ConfigFields(parameters, f"{fields.source}: rope parameters")
    for part in (own.get("partial_rotary_factor"), fields.get("partial_rotary_factor")):
        if part not in (None, 1):
            raise fields.unsupported(
                "partial_rotary_factor", part, "rotary on a part of the head only"
            )
    base = own.number("rope_theta", theta)
    match own.get("rope_type", own.get("type", "default")):
        case "default" if "mrope_section" not in parameters:
            rope = RopeConfig(base=base)
        case "linear":
            rope = RopeConfig(base=base, linear_factor=own.number("factor"))
        case "llama3":
            length = fields if outer_length is not None else own
            rope = RopeConfig(base=base, llama3=_llama3(own, length, fields))
        case kind:
            raise fields.unsupported("rope_type", kind, "rotary scaling but linear and llama3")
    with np.errstate(all="ignore"):
        tables = rotary_tables(rope, head_dim, 2)
    if not np.isfinite(tables).all():
        raise CheckpointError(
            f"{fields.source}: rope_theta {base} and factor {own.get('factor', 1)} give rotary "
            "frequencies that are not finite; get the file again"
        )
    return rope


def _llama3(own: ConfigFields, length: ConfigFields, fields: ConfigFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=own.number("factor"),
        low_freq_factor=own.number("low_freq_factor"),
        high_freq_factor=own.number("high_freq_factor"),
        original_context_length=length.count(_OUTER_LENGTH, fields.get("max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{own.source}: high_freq_factor {scaling.high_freq_factor} must be above "
            f"low_freq_factor {scaling.low_freq_factor}; get the file again"
        )
    return scaling
