"""Names and shapes of LoRA tensors: one function for the graph, the trainer and PEFT."""

from typing import Literal

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

DEFAULT_RANK = 16
"""Of the LoRA inputs that a drafter is exported with."""

Side = Literal["A", "B"]


def lora_name(layer: int, module: str, side: Side) -> str:
    """Graph input that holds one factor: A is ``[in, rank]``, B is ``[rank, out]``.

    The adapted projection is ``x @ W.T + (x @ A) @ B``; the scale alpha / rank is
    folded into B.
    """
    if module not in MODULES:
        raise ValueError(f"no LoRA module {module!r}, there are {', '.join(MODULES)}")
    return f"lora.layers.{layer}.{module}.{side}"
