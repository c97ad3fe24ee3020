"""From the fields of a Hugging Face `config.json` to a `DecoderConfig`.

What a builder would compute wrongly (another attention, another rotary scaling,
experts, quantised weights) is refused by name; nothing of that kind is ignored.
"""

from collections.abc import Mapping
from typing import Any

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from ..architecture import Activation, DecoderConfig, LayerType
from .config_fields import TRY_OPTIMUM, ConfigFields
from .config_keys import check_keys
from .hf_rope import rope_configs

SUPPORTED = "llama (vicuna too), mistral, qwen2, qwen3 and gemma3 text"

# What transformers assumes where a file is silent; published gemma3 files leave most fields out.
_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

_LAYER_TYPES: dict[str, LayerType] = {"full_attention": "full", "sliding_attention": "sliding"}


def decoder_config(
    document: Mapping[str, Any],
    source: str,
    *,
    num_tensors: int | None = None,
    other_way: str = TRY_OPTIMUM,
) -> DecoderConfig:
    """The decoder that a `config.json` of transformers 4 or 5 describes.

    Args:
        document: the parsed file; of a multimodal gemma3, the text part is taken.
        source: what to call the file in an error.
        num_tensors: of the checkpoint, where known; it has no more layers.
        other_way: what to do about a decoder that is not supported.

    Raises:
        CheckpointError: the architecture or a variant of it is not supported, or a
            field is missing or has an impossible value.
    """
    fields = _fields_of_text_model(document, source, other_way)
    family = fields.text("model_type")
    check_keys(fields, family)
    is_gemma = family == "gemma3_text"
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{source}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads; "
            "the file is damaged"
        )
    head_dim = _head_dim(fields, hidden_size, num_heads)
    layer_types, window = _attention_kinds(fields, num_tensors)
    rope, local_rope = rope_configs(fields, head_dim)
    has_bias = family in ("llama", "qwen3", "gemma3_text") and fields.flag("attention_bias")
    return DecoderConfig(
        architecture=family,
        num_layers=len(layer_types),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_logits=fields.count("vocab_size"),
        context_length=_context_length(fields, 1.0 if is_gemma else rope.linear_factor),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        local_rope=local_rope if "sliding" in layer_types else None,
        layer_types=layer_types,
        sliding_window=window,
        attention_scale=(fields.number("query_pre_attn_scalar") if is_gemma else head_dim) ** -0.5,
        activation=_activation(fields),
        has_qkv_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias,
        has_mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        has_qk_norm=family in ("qwen3", "gemma3_text"),
        has_sandwich_norms=is_gemma,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        has_tied_head=fields.flag("tie_word_embeddings"),
    )


def _fields_of_text_model(document: Mapping[str, Any], source: str, other_way: str) -> ConfigFields:
    """The decoder's own fields, completed with what transformers assumes."""
    model_type = document.get("model_type")
    if model_type == "gemma3":
        text = document.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(
                f"{source}: model_type 'gemma3' without a text_config; get the file again"
            )
        model_type = "gemma3_text"
        outer = ConfigFields(document, source, other_way=other_way)
        check_keys(outer, model_type)
        # The head belongs to the whole model: its own field decides, whatever the text part has.
        tied = {"tie_word_embeddings": outer.get("tie_word_embeddings", True)}
        document = dict(text) | tied | {"model_type": model_type}
    if not isinstance(model_type, str) or model_type not in DEFAULTS:
        raise CheckpointError(
            f"{source}: model_type {shown_text(repr(model_type))} is not supported; supported are "
            f"{SUPPORTED}; {other_way}"
        )
    classes = document.get("architectures") or ["ForCausalLM"]
    if not isinstance(classes, list) or not any(
        str(name).endswith(("CausalLM", "ConditionalGeneration", "Model")) for name in classes
    ):
        raise CheckpointError(
            f"{source}: architectures {shown_text(repr(classes))} is not a causal language model; "
            "use a checkpoint that generates text"
        )
    return ConfigFields(DEFAULTS[model_type] | dict(document), source, other_way=other_way)


def _context_length(fields: ConfigFields, linear_factor: float) -> int:
    """Tokens the model is made for; linear scaling stretches what it was trained for.

    Configurations of Gemma 3 name the stretched length already.

    Source:
        vLLM, `_get_and_verify_max_len`.
    """
    trained = fields.count("max_position_embeddings")
    return min(int(trained * max(1.0, linear_factor)), 2**31 - 1)


_LARGEST_HEAD = 2**16
"""Rotary tables are made for a head before any tensor shows that its size is wrong."""


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    """`head_dim`, or the width shared out among the heads."""
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.source}: hidden_size {hidden_size} is not a multiple of "
            f"{num_heads} heads and there is no head_dim; the file is damaged"
        )
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.unsupported(
            "head_dim", head_dim, "an odd head size (rotary needs an even one)"
        )
    if head_dim > _LARGEST_HEAD:
        raise CheckpointError(
            f"{fields.source}: heads of {head_dim} (hidden_size {hidden_size}, {num_heads} heads) "
            f"are larger than {_LARGEST_HEAD}; the file is damaged"
        )
    return head_dim


def _activation(fields: ConfigFields) -> Activation:
    """The gate's activation; gemma3 keeps it in a field of its own."""
    is_gemma = fields.get("model_type") == "gemma3_text"
    name = "hidden_activation" if is_gemma else "hidden_act"
    value = fields.get(name, "silu")
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise fields.unsupported(name, value, f"an activation other than {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _attention_kinds(
    fields: ConfigFields, num_tensors: int | None
) -> tuple[tuple[LayerType, ...], int | None]:
    """Kind of every layer, and the window of the sliding ones (None where there are none)."""
    num_layers = fields.count("num_hidden_layers")
    if num_tensors is not None and num_layers > num_tensors:
        raise CheckpointError(
            f"{fields.source}: num_hidden_layers is {num_layers}, but the checkpoint has "
            f"{num_tensors} tensors; they are not of one model or the file is damaged"
        )
    kinds = _usual_kinds(fields, num_layers)
    stated = fields.get("layer_types")
    if stated is not None:
        kinds = _stated_kinds(fields, stated, kinds)
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{fields.source}: layer_types names {len(kinds)} layers, num_hidden_layers is "
            f"{num_layers}; the file is damaged"
        )
    return kinds, fields.count("sliding_window") if "sliding" in kinds else None


def _usual_kinds(fields: ConfigFields, num_layers: int) -> tuple[LayerType, ...]:
    """What the family does where `layer_types` is silent."""
    match fields.text("model_type"):
        case "gemma3_text":
            period = fields.count("sliding_window_pattern", 6)
            return tuple("sliding" if (i + 1) % period else "full" for i in range(num_layers))
        case "mistral":
            first_sliding = num_layers if fields.get("sliding_window") is None else 0
        case "qwen2" | "qwen3" if _has_window(fields):
            first_sliding = fields.count("max_window_layers", least=0)
        case _:
            first_sliding = num_layers
    return tuple("sliding" if i >= first_sliding else "full" for i in range(num_layers))


def _has_window(fields: ConfigFields) -> bool:
    return fields.flag("use_sliding_window") and fields.get("sliding_window") is not None


def _stated_kinds(
    fields: ConfigFields, stated: Any, usual: tuple[LayerType, ...]
) -> tuple[LayerType, ...]:
    """`layer_types` in our words, where the family really follows them."""
    if not isinstance(stated, list | tuple):
        raise fields.unsupported("layer_types", stated, "anything but a list of layers")
    for name in stated:
        if not isinstance(name, str) or name not in _LAYER_TYPES:
            raise fields.unsupported("layer_types", name, "a layer neither full nor sliding")
    kinds = tuple(_LAYER_TYPES[name] for name in stated)
    family = fields.text("model_type")
    if family in ("llama", "mistral") and kinds != usual:
        raise fields.unsupported("layer_types", list(stated), f"a mixture that no {family} has")
    if family in ("qwen2", "qwen3") and "sliding" in kinds and not _has_window(fields):
        raise fields.unsupported("use_sliding_window", False, "sliding layers without a window")
    return kinds
