"""`genai_config.json`: lets onnxruntime-genai run a graph of the CPU flavour as it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnidraft_npu.files import write_json

from .architecture import DecoderConfig
from .head_padding import padded_head_dim


def write_genai_config(
    folder: Path,
    config: DecoderConfig,
    *,
    context_length: int,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None,
) -> Path:
    """Write ``genai_config.json`` beside ``model.onnx``.

    Args:
        folder: of the graph. onnxruntime-genai wants tokenizer files there only if it is to
            turn text into ids.
        config: of the model.
        context_length: of the graph.
        eos_token_ids: Ids that end a response.
        bos_token_id: First id of a sequence, None if there is none.
    """
    path = folder / "genai_config.json"
    model = _model(config, context_length, list(eos_token_ids), bos_token_id)
    search = {"do_sample": False, "max_length": context_length, "past_present_share_buffer": True}
    write_json(path, {"model": model, "search": search})
    return path


def _model(
    config: DecoderConfig, context_length: int, eos_token_ids: list[int], bos_token_id: int | None
) -> dict[str, Any]:
    eos = eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids
    return {
        "type": "gemma" if config.has_sandwich_norms else "llama",
        "bos_token_id": eos_token_ids[0] if bos_token_id is None else bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": eos_token_ids[0],
        "context_length": context_length,
        "vocab_size": config.num_logits,
        "decoder": {
            "session_options": {"log_severity_level": 3, "provider_options": []},
            "filename": "model.onnx",
            "head_size": padded_head_dim(config.head_dim),
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "num_hidden_layers": config.num_layers,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
