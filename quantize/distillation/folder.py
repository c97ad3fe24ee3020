"""A finished drafter as a Hugging Face folder that `export` reads."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.files import write_json, write_safetensors

from ..architecture import DecoderConfig
from ..checkpoints.checkpoint import TokenizerFiles
from ..checkpoints.tensor_names import hugging_face_name
from .llama import Llama, canonical_name

Array = npt.NDArray[Any]


def write_drafter(folder: Path, model: Llama, files: TokenizerFiles) -> None:
    """Write weights (int8 with a scale a row), configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Array] = {}
    for parameter, values in model.state_dict().items():
        name = "model." + hugging_face_name(canonical_name(parameter), has_sandwich_norms=False)
        array = values.detach().float().cpu().numpy()
        tensors |= _stored(name, array)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", files.tokenizer_config)
    write_json(folder / "config.json", hugging_face_config(model.config, files))


def _stored(name: str, values: Array) -> dict[str, Array]:
    """A matrix as rounded rows and their scales, a vector as it is."""
    if values.ndim == 1:
        return {name: values.astype(np.float16)}
    scale = np.maximum(np.abs(values).max(axis=1) / 127, 1e-7).astype(np.float16)
    rounded = np.rint(values / scale.astype(np.float32)[:, None]).clip(-127, 127)
    return {name: rounded.astype(np.int8), f"{name}_scale": scale}


def hugging_face_config(config: DecoderConfig, files: TokenizerFiles) -> dict[str, Any]:
    """The `config.json` of a drafter."""
    factor = config.rope.linear_factor
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor != 1 else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.num_logits,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.base,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": files.bos_token_id,
        "eos_token_id": list(files.eos_token_ids),
        "torch_dtype": "float16",
        **scaling,
    }
