"""Tiny random models of every supported architecture, made by transformers.

Every parameter is drawn at random (norms and biases too: what transformers initialises
to ones and zeros would hide mistakes) and large enough for attention to be far from uniform.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = ("llama", "llama3-scaled", "mistral-sliding", "qwen2", "qwen3", "gemma3_text")

_COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3-scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
    },
    "mistral-sliding": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "tie_word_embeddings": True,
    },
}


def tiny_model(architecture: str, *, seed: int = 0, **overrides: Any) -> "PreTrainedModel":
    """A random float32 causal LM in evaluation mode, the same for the same arguments.

    Args:
        architecture: one of `ARCHITECTURES`.
        seed: of the weights.
        overrides: fields of the transformers configuration, `tie_word_embeddings=False`
            or `attention_bias=True` for example.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type = architecture.partition("-")[0].replace("llama3", "llama")
    settings = _COMMON | _OWN[architecture] | overrides
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise, gemma=model_type == "gemma3_text"))
    return model


def _scaled(name: str, noise: Any, *, gemma: bool) -> Any:
    """Noise of a suitable size: norms stay positive, projections keep the variance."""
    if "norm" in name:
        return 0.2 * noise + (0.0 if gemma else 1.0)
    if noise.ndim == 1:
        return 0.3 * noise
    return noise / noise.shape[1] ** 0.5
