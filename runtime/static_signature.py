"""What the static graphs of a model take and give, read from the graphs themselves."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort

from omnidraft_npu.documents import shown_value
from omnidraft_npu.errors import BundleError

from .providers import is_size

_KV_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(uint16)": np.dtype(np.uint16),
}
_PAST = re.compile(r"past_key_values\.(\d+\.(?:key|value))")


@dataclass(frozen=True, kw_only=True)
class StaticCacheTensor:
    """A part of the cache ``[1, heads, context, dim]`` and the output with a pass's new rows."""

    past: str
    new: str
    num_heads: int
    head_dim: int
    dtype: np.dtype[Any]
    """An integer type where the graph takes and gives the cache quantised."""


@dataclass(frozen=True, kw_only=True)
class StaticSignature:
    """Inputs and outputs that the graphs of all lengths have in common."""

    context_length: int
    """Slots of the cache."""
    cache_tensors: tuple[StaticCacheTensor, ...]
    has_sliding_mask: bool
    lora_inputs: dict[str, tuple[int, ...]]
    """Shapes by name (`omnidraft_npu.lora.lora_name`)."""
    num_logits: int
    hidden_size: int | None
    """Width of the `hidden_states` output; None if there is none."""
    scored_lengths: tuple[int, ...] = ()
    """Lengths whose graphs give logits; the others fill the cache and nothing else."""


def read_static_signature(
    sessions: Mapping[int, ort.InferenceSession], where: str
) -> StaticSignature:
    """Read the graphs of every length and check that they belong together.

    Args:
        sessions: Opened graphs by length.
        where: The folder of the graphs, for messages.

    Raises:
        BundleError: a graph is not of its length, not static, or differs from the others.
    """
    found = {length: _read(session, length, where) for length, session in sessions.items()}
    scored = tuple(length for length, signature in found.items() if signature.num_logits)
    if not scored:
        raise BundleError(f"{where}: no graph gives logits for every token: export the model again")
    first = found[scored[0]]
    for length, signature in found.items():
        expected = first if length in scored else replace(first, num_logits=0, hidden_size=None)
        if signature != expected:
            raise BundleError(
                f"{where}: the graphs of {scored[0]} and {length} tokens differ in more than their "
                "length: export the model again"
            )
    return replace(first, scored_lengths=scored)


def _read(session: ort.InferenceSession, length: int, where: str) -> StaticSignature:
    where = f"{where}: the graph of {length} tokens"
    inputs = {i.name: i for i in session.get_inputs()}
    outputs = {o.name: o for o in session.get_outputs()}
    tensors = tuple(
        _cache_tensor(node, match, outputs, length, where)
        for name, node in inputs.items()
        if (match := _PAST.fullmatch(name))
    )
    contexts = {inputs[tensor.past].shape[2] for tensor in tensors}
    if len(contexts) != 1 or not all(map(is_size, contexts)):
        raise BundleError(f"{where} has no cache of one length: export the model again")
    (context,) = contexts
    mask = [1, 1, length, context + length]
    shapes = {"input_ids": [1, length], "position_ids": [1, length], "attention_mask": mask}
    if "sliding_mask" in inputs:
        shapes["sliding_mask"] = mask
    for name, shape in shapes.items():
        found = list(inputs[name].shape) if name in inputs else None
        if found != shape:
            raise BundleError(f"{where} has {name} of shape {found}, not {shape}: export again")
    lora = {n: tuple(i.shape) for n, i in inputs.items() if n.startswith("lora.")}
    unknown = inputs.keys() - shapes.keys() - lora.keys() - {t.past for t in tensors}
    if unknown:
        raise BundleError(
            f"{where} has an input {shown_value(min(unknown))} that this runtime cannot feed"
        )
    if not all(is_size(size) for shape in lora.values() for size in shape):
        raise BundleError(f"{where} has LoRA inputs of open shapes: export the model again")
    logits, hidden = outputs.get("logits"), outputs.get("hidden_states")
    for node in filter(None, (logits, hidden)):
        if len(node.shape) != 3 or not is_size(node.shape[2]):
            raise BundleError(f"{where} gives {node.name} of an open shape: export the model again")
    if logits and (list(logits.shape[:2]) != [1, length] or logits.type != "tensor(float)"):
        raise BundleError(f"{where} gives no float logits for every token: export the model again")
    return StaticSignature(
        context_length=context,
        cache_tensors=tensors,
        has_sliding_mask="sliding_mask" in inputs,
        lora_inputs=lora,
        num_logits=logits.shape[2] if logits else 0,
        hidden_size=hidden.shape[-1] if hidden else None,
    )


def _cache_tensor(
    node: Any, match: re.Match[str], outputs: Mapping[str, Any], length: int, where: str
) -> StaticCacheTensor:
    new = f"new.{match[1]}"
    if len(node.shape) != 4 or not (is_size(node.shape[1]) and is_size(node.shape[3])):
        raise BundleError(f"{where} has {node.name} of an open shape: export the model again")
    _, heads, _, dim = node.shape
    if new not in outputs or list(outputs[new].shape) != [1, heads, length, dim]:
        raise BundleError(f"{where} takes {node.name} but gives no new rows for it: export again")
    if node.type not in _KV_DTYPES or outputs[new].type != node.type:
        raise BundleError(f"{where} has {node.name} of type {node.type}, which is not supported")
    return StaticCacheTensor(
        past=node.name, new=new, num_heads=heads, head_dim=dim, dtype=_KV_DTYPES[node.type]
    )
