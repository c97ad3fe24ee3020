"""Tiny models beside what transformers makes of them: the truth for every graph of ours."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.quantize.architecture import DecoderConfig
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint

Floats = npt.NDArray[np.float32]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "gemma3-untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "llama-heads-of-100": ("llama", {"head_dim": 100, "attention_bias": True}),
    "gemma3-heads-of-40": ("gemma3_text", {"head_dim": 40}),
}
TOLERANCE = 1e-4
"""Of the range of the logits."""


@dataclass(frozen=True)
class Model:
    config: DecoderConfig
    tensors: dict[str, Floats]
    reference: Any

    def logits(self, ids: list[int]) -> Floats:
        import torch

        with torch.no_grad():
            return self.reference(torch.tensor([ids])).logits[0].numpy()

    def hidden_states(self, ids: list[int]) -> Floats:
        import torch

        with torch.no_grad():
            return self.reference.model(torch.tensor([ids])).last_hidden_state[0].numpy()


def reference_model(folder: Path, variant: str, **overrides: Any) -> Model:
    """One of `VARIANTS`, saved into `folder` and read again by our reader."""
    architecture, settings = VARIANTS[variant]
    reference = tiny_model(architecture, **settings, **overrides)
    reference.save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.config.tensor_shapes()}
    return Model(checkpoint.config, tensors, reference)


def random_ids(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, 160, length).tolist()


def random_lora(
    rng: np.random.Generator, model: Model, zeros: dict[str, Floats]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Random factors of the shapes of `zeros`, and the model's tensors with them merged in."""
    lora = {
        name: rng.normal(size=zero.shape).astype(np.float32) * np.float32(0.2)
        for name, zero in zeros.items()
    }
    merged = dict(model.tensors)
    for name in lora:
        if name.endswith(".A"):
            tensor = name.removeprefix("lora.").removesuffix(".A")
            merged[tensor] = merged[tensor] + (lora[name] @ lora[f"{name[:-1]}B"]).T
    return lora, merged


def assert_close(logits: Floats, expected: Floats, tolerance: float = TOLERANCE) -> None:
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() < tolerance * np.ptp(expected)
