"""Tiny checkpoints of every supported architecture in the variants that users have.

transformers makes and saves each of them, edits to `config.json` give it the form of other
versions, and transformers reads it again: what it then computes is right.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Edit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Variant:
    """One checkpoint: a model of `tiny_models`, and what is changed."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    edit: Edit | None = None
    """Changes `config.json` once it is saved."""
    dtype: str = "float32"
    """Of the stored weights."""


def rope(kind: str, theta: float = 1e4, **parameters: Any) -> dict[str, Any]:
    """Rotary parameters of transformers 5."""
    if kind == "llama3":
        parameters = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        } | parameters
    return {"rope_type": kind, "rope_theta": theta} | parameters


def as_written_by_4(document: dict[str, Any]) -> None:
    """`rope_theta` and `rope_scaling` in place of `rope_parameters`, `torch_dtype` of `dtype`."""
    parameters = document.pop("rope_parameters")
    document["torch_dtype"] = document.pop("dtype")
    document["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    document["rope_scaling"] = None if kind == "default" else {"type": kind} | parameters


def gemma_as_written_by_4(document: dict[str, Any]) -> None:
    """A pattern in place of `layer_types`, and three fields of `rope_parameters`."""
    parameters = document.pop("rope_parameters")
    del document["layer_types"]
    document.pop("_sliding_window_pattern", None)
    document |= {
        "sliding_window_pattern": 2,
        "rope_theta": parameters["full_attention"]["rope_theta"],
        "rope_local_base_freq": parameters["sliding_attention"]["rope_theta"],
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }


def setting(**fields: Any) -> Edit:
    """Sets fields."""
    return lambda document: document.update(fields)


def without(*names: str) -> Edit:
    """Drops fields."""

    def drop(document: dict[str, Any]) -> None:
        for name in names:
            del document[name]

    return drop


_HEADS: dict[str, dict[str, Any]] = {
    "as many key-value heads": {"num_key_value_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "heads of 24": {"head_dim": 24},
    "heads of 20": {"head_dim": 20},
    "a large epsilon": {"rms_norm_eps": 0.05},
    "sizes that fit no block": {"hidden_size": 40, "intermediate_size": 56, "head_dim": 16},
}
_ROPE: dict[str, dict[str, Any]] = {
    "another base": {"rope_parameters": rope("default", 5e5)},
    "linear rope": {"rope_parameters": rope("linear", factor=4.0)},
    "llama3 rope": {"rope_parameters": rope("llama3", 5e5)},
}
_SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]
_WINDOWS: dict[str, dict[str, Any]] = {
    "a window on the last layers": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "named layers": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": _SLIDING[::-1],
    },
    "a window that is not used": {"use_sliding_window": False, "sliding_window": 8},
}


def _variants(model: str, *groups: dict[str, dict[str, Any]]) -> dict[str, Variant]:
    family = model.partition("-")[0].removesuffix("_text")
    return {
        f"{family}, {name}": Variant(model, settings)
        for group in groups
        for name, settings in group.items()
    }


_GEMMA_ROPE = {
    "full_attention": rope("linear", 1e6, factor=8.0),
    "sliding_attention": rope("default", 5e3),
}

VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama"),
    **_variants("llama", _HEADS, _ROPE),
    "llama, tied": Variant("llama", {"tie_word_embeddings": True}),
    "llama, biases": Variant("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": Variant("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, bfloat16": Variant("llama", dtype="bfloat16"),
    "llama, float16": Variant("llama", {"tie_word_embeddings": True}, dtype="float16"),
    "llama, transformers 4": Variant(
        "llama", {"rope_parameters": rope("llama3", 5e5)}, as_written_by_4
    ),
    "llama, transformers 4 linear": Variant(
        "llama", {"rope_parameters": rope("linear", 2e4, factor=2.0)}, as_written_by_4
    ),
    "llama, outer original length": Variant(
        "llama",
        {"rope_parameters": rope("llama3")},
        setting(original_max_position_embeddings=16),
    ),
    "llama, both rope fields": Variant(
        "llama",
        {"rope_parameters": rope("llama3")},
        setting(rope_scaling={"type": "linear", "factor": 3.0}, rope_theta=2e4),
    ),
    "llama, no original length": Variant(
        "llama",
        {"rope_parameters": rope("llama3")},
        lambda document: document["rope_parameters"].pop("original_max_position_embeddings"),
    ),
    "llama, fields left out": Variant(
        "llama",
        {"rms_norm_eps": 1e-6, "num_key_value_heads": 4},
        without("rms_norm_eps", "num_key_value_heads", "head_dim", "hidden_act", "attention_bias"),
    ),
    "mistral, window": Variant("mistral-sliding"),
    "mistral, no window": Variant("mistral-sliding", {"sliding_window": None}),
    "mistral, tied": Variant("mistral-sliding", {"tie_word_embeddings": True}),
    "mistral, wide window": Variant("mistral-sliding", {"sliding_window": 50}),
    "mistral, silent on its window": Variant(
        "mistral-sliding", {"sliding_window": 4096}, without("sliding_window")
    ),
    **_variants("mistral-sliding", _HEADS, _ROPE),
    "mistral, transformers 4": Variant(
        "mistral-sliding", {"rope_parameters": rope("default", 1e6)}, as_written_by_4
    ),
    "qwen2, tied": Variant("qwen2"),
    "qwen2, untied": Variant("qwen2", {"tie_word_embeddings": False}),
    "qwen2, gelu": Variant("qwen2", {"hidden_act": "gelu_new"}),
    **_variants("qwen2", _HEADS, _ROPE, _WINDOWS),
    "qwen2, transformers 4": Variant(
        "qwen2",
        {"rope_parameters": rope("default", 1e6)} | _WINDOWS["a window on the last layers"],
        lambda document: (as_written_by_4(document), document.pop("layer_types")),
    ),
    "qwen3": Variant("qwen3"),
    "qwen3, tied": Variant("qwen3", {"tie_word_embeddings": True}),
    "qwen3, biases": Variant("qwen3", {"attention_bias": True}),
    "qwen3, heads of 128": Variant("qwen3", {"head_dim": 128}, without("head_dim")),
    **_variants("qwen3", _HEADS, _ROPE, _WINDOWS),
    "gemma3": Variant("gemma3_text"),
    "gemma3, untied": Variant("gemma3_text", {"tie_word_embeddings": False}),
    "gemma3, biases": Variant("gemma3_text", {"attention_bias": True}),
    "gemma3, sharp scores": Variant("gemma3_text", {"query_pre_attn_scalar": 8}),
    "gemma3, full layers": Variant("gemma3_text", {"layer_types": ["full_attention"] * 4}),
    "gemma3, sliding layers": Variant("gemma3_text", {"layer_types": ["sliding_attention"] * 4}),
    "gemma3, its rope": Variant("gemma3_text", {"rope_parameters": _GEMMA_ROPE}),
    "gemma3, bfloat16": Variant("gemma3_text", dtype="bfloat16"),
    "gemma3, transformers 4": Variant(
        "gemma3_text", {"rope_parameters": _GEMMA_ROPE}, gemma_as_written_by_4
    ),
    "gemma3, silent on its layers": Variant(
        "gemma3_text",
        {"num_hidden_layers": 7, "layer_types": (_SLIDING[1:] * 3)[:5] + _SLIDING[:2]},
        without("layer_types"),
    ),
    **_variants("gemma3_text", _HEADS),
}


def write_variant(folder: Path, variant: Variant) -> "PreTrainedModel":
    """Save a checkpoint; the model that transformers reads from it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny_model(variant.model, **variant.settings)
    model.to(getattr(torch, variant.dtype)).save_pretrained(folder)
    if variant.edit is not None:
        path = folder / "config.json"
        document = json.loads(path.read_text())
        variant.edit(document)
        path.write_text(json.dumps(document))
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_multimodal_gemma(folder: Path) -> "PreTrainedModel":
    """Save a Gemma 3 that reads images too; the model that transformers reads from it."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3Config

    text = tiny_model("gemma3_text")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    model = AutoModelForCausalLM.from_config(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
