"""From the metadata of a GGUF file to the `config.json` that describes the same decoder."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from .config_fields import ConfigFields
from .gguf_file import GgufHeader
from .gguf_keys import check_metadata, decided_metadata
from .gguf_rope import llama3_scaling
from .hf_config import SUPPORTED

USE_FOLDER = "use its Hugging Face folder with --exporter optimum"
"""What to do about a file that is not supported; the other exporter takes folders only."""

_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


def config_document(
    header: GgufHeader, frequency_factors: Sequence[float] | None, source: str, other_way: str
) -> dict[str, Any]:
    """A `config.json` as transformers 4 would write it; `decoder_config` checks it further.

    Args:
        header: metadata, and the tensors: whether biases and a head are there decides.
        frequency_factors: ``[head_dim / 2]`` what rotary frequencies are divided by, from the
            file's ``rope_freqs.weight``. None where it has none.
        source: what to call the file in an error.
        other_way: what to do about a decoder that is not supported.

    Raises:
        CheckpointError: the architecture or a variant of it is not supported, or metadata is
            missing.
    """
    fields = _own_fields(header, source, other_way)
    family = fields.text("general.architecture")
    check_metadata(fields, f"{family}.")
    model_type, class_name = _FAMILIES[family]
    num_heads = fields.count("attention.head_count")
    hidden_size = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden_size // num_heads)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported(
            "attention.value_length", fields.get("attention.value_length"), "values unlike keys"
        )
    document = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "num_experts": fields.get("expert_count"),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "attn_logit_softcapping": fields.get("attn_logit_softcapping"),
        "bos_token_id": _row(fields, header, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _row(fields, header, "tokenizer.ggml.eos_token_id"),
    }
    document |= _rotary(fields, head_dim, frequency_factors)
    document |= _variant(fields, model_type, header)
    return {name: value for name, value in document.items() if value is not None}


def generation_document(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A `generation_config.json` of the sampling that a file recommends, empty for none.

    llama.cpp samples unless the temperature is 0 or below.
    """
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
        "xtc_probability": "xtc_probability",
        "mirostat": "mirostat",
    }
    found = {
        theirs: _plain(fields[f"general.sampling.{ours}"])
        for ours, theirs in names.items()
        if f"general.sampling.{ours}" in fields
    }
    temperature = found.get("temperature")
    if isinstance(temperature, int | float):
        found |= {"do_sample": temperature > 0, "temperature": max(temperature, 0.0)}
    if isinstance(found.get("top_k"), int):
        found["top_k"] = max(found["top_k"], 0)
    return found


def _own_fields(header: GgufHeader, source: str, other_way: str) -> ConfigFields:
    """The metadata without the architecture's name before the keys."""
    _refuse_other_kinds(header, source)
    family = header.fields.get("general.architecture")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise CheckpointError(
            f"{source}: architecture {shown_text(repr(family))} is not supported; supported are "
            f"{SUPPORTED}; {other_way}"
        )
    if not header.tensors:
        raise CheckpointError(
            f"{source} holds a vocabulary only, no weights; give the file of the whole model"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing; get the file again")
    known = {f"{family}.{name}": name for name in decided_metadata()}
    plain = {known.get(key, key): _plain(value) for key, value in header.fields.items()}
    return ConfigFields(plain, source, other_way=other_way)


def _refuse_other_kinds(header: GgufHeader, source: str) -> None:
    """Refuse a GGUF file that is only a part of a model, or no language model."""
    fields = header.fields
    count, number = fields.get("split.count", 0), fields.get("split.no", 0)
    if isinstance(count, int) and count > 1:
        which = f"part {number + 1}" if isinstance(number, int) else "one"
        raise CheckpointError(
            f"{source} is {which} of {count} parts; join them with llama-gguf-split --merge, "
            "which takes the first part and the name of the result"
        )
    kind = fields.get("general.type")
    if kind == "adapter" or "adapter.type" in fields:
        raise CheckpointError(
            f"{source} holds a LoRA adapter, not a model; merge it into its base model "
            "(llama-export-lora) and give the result"
        )
    if kind == "mmproj" or fields.get("general.architecture") == "clip":
        raise CheckpointError(
            f"{source} holds the part of a model that reads images or sound (mmproj); give the "
            "file with its text model"
        )
    if kind == "imatrix" or "imatrix.datasets" in fields:
        raise CheckpointError(
            f"{source} holds statistics for quantising (imatrix), not a model; give the model"
        )


def _plain(value: Any) -> Any:
    """A float32 as it is usually written (1e-06), a list of equal items as the item."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _row(fields: ConfigFields, header: GgufHeader, name: str) -> int | None:
    """An id that the embedding has a row for; converters write 4294967295 for none."""
    value = fields.get(name)
    rows = header.tensors["token_embd.weight"].shape[0]
    return value if isinstance(value, int) and 0 <= value < rows else None


def _rotary(
    fields: ConfigFields, head_dim: int, frequency_factors: Sequence[float] | None
) -> dict[str, Any]:
    """Rotary fields of transformers 4."""
    default = 1_000_000.0 if fields.get("general.architecture") == "gemma3" else 10_000.0
    rotary: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", default)}
    rotated = fields.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rotary["partial_rotary_factor"] = rotated / head_dim
    kind = fields.get("rope.scaling.type", "none")
    if kind != "none":
        rotary["rope_scaling"] = {"rope_type": kind, "factor": fields.get("rope.scaling.factor")}
    elif fields.get("rope.scale_linear", 1.0) != 1.0:
        rotary["rope_scaling"] = {"rope_type": "linear", "factor": fields.get("rope.scale_linear")}
    if frequency_factors is not None:
        fits = 2 * len(frequency_factors) == head_dim
        scaling = llama3_scaling(frequency_factors, rotary["rope_theta"]) if fits else None
        if scaling is None or "rope_scaling" in rotary:
            raise fields.unsupported(
                "rope_freqs.weight", list(frequency_factors), "rotary scaling but llama3's"
            )
        rotary["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    return rotary


def _variant(fields: ConfigFields, model_type: str, header: GgufHeader) -> dict[str, Any]:
    """Fields that one family only has."""
    window = fields.get("attention.sliding_window")
    if model_type == "gemma3_text":
        return _gemma3(fields, window)
    own: dict[str, Any] = {"hidden_act": "silu"}
    if model_type == "llama":
        own["mlp_bias"] = "blk.0.ffn_down.bias" in header.tensors
    if window is None:
        return own
    if model_type != "llama":
        raise fields.unsupported("attention.sliding_window", window, "a window in this family")
    # Mistral's files are of architecture llama.
    return own | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": window,
    }


def _gemma3(fields: ConfigFields, window: int | None) -> dict[str, Any]:
    hidden_size, num_heads = fields.count("embedding_length"), fields.count("attention.head_count")
    # The file does not say the attention scale; 27B, the one of 62 layers, is the exception.
    is_27b = fields.count("block_count") == 62
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_size // num_heads
        if is_27b
        else fields.count("attention.key_length", 256),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10_000.0),
        "sliding_window": window,
    }
    pattern = fields.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        own["layer_types"] = ["sliding_attention" if on else "full_attention" for on in pattern]
    else:
        own["sliding_window_pattern"] = pattern
    return own
