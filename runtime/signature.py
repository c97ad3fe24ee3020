"""What a decoder graph takes and gives, read from the graph itself."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from omnidraft_npu.decoder_inputs import ATTENTION_ROWS, LOGITS_FROM
from omnidraft_npu.documents import shown_text, shown_value
from omnidraft_npu.errors import BundleError
from omnidraft_npu.manifest import Cache

from .providers import is_size

DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
}

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")
_PLAIN_RANKS = {"input_ids": 2, "attention_mask": 2, "position_ids": 2, "cache_position": 1}


@dataclass(frozen=True, kw_only=True)
class CacheTensor:
    """One past input and the present output that continues it, ``[1, heads, tokens, dim]``."""

    past: str
    present: str
    num_heads: int
    head_dim: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, kw_only=True)
class GraphSignature:
    """Inputs and outputs of a decoder graph."""

    cache: Cache
    """`shared` if the past is a buffer of the whole context, `concat` if it grows."""
    cache_tensors: tuple[CacheTensor, ...]
    plain_inputs: dict[str, np.dtype[Any]]
    """Those of `input_ids`, `attention_mask`, `position_ids`, `cache_position` there are."""
    has_logits_from: bool
    has_attention_rows: bool
    lora_inputs: dict[str, tuple[int, ...]]
    """Shapes by name (`omnidraft_npu.lora.lora_name`)."""
    num_logits: int
    logits_dtype: np.dtype[Any]
    hidden_size: int | None
    """Width of the `hidden_states` output; None if there is none."""


def read_signature(
    session: ort.InferenceSession,
    path: Path,
    *,
    context_length: int,
    num_logits: int,
    cache: Cache | None = None,
) -> GraphSignature:
    """Read a session's inputs and outputs and check that the runtime can feed them.

    Args:
        session: The opened graph.
        path: Its file, for messages.
        context_length: The manifest's limit; a fixed buffer must have this many slots.
        num_logits: The manifest's rows of the logits.
        cache: The manifest's kind of cache; None takes `shared` where the past has a fixed
            length and `concat` otherwise.

    Raises:
        BundleError: an input or output is missing, unknown or does not match the manifest.
    """
    inputs = {i.name: i for i in session.get_inputs()}
    outputs = {o.name: o for o in session.get_outputs()}
    if missing := {"input_ids", "logits"} - inputs.keys() - outputs.keys():
        raise BundleError(f"{path} has no {min(missing)!r}, so it is not a decoder graph")
    for name in ("logits", *(n for n in ("hidden_states",) if n in outputs)):
        _check_rows(outputs[name], path)
    tensors = _cache_tensors(inputs, outputs, path)
    slots = {inputs[t.past].shape[2] for t in tensors}
    fixed = {s for s in slots if isinstance(s, int)}
    if fixed - {context_length}:
        raise BundleError(
            f"{path} has a cache of {max(fixed)} tokens, the manifest says {context_length}"
        )
    if fixed and cache == "concat":
        raise BundleError(f"{path} has a cache of fixed length, the manifest says `concat`")
    plain = {name: inputs[name] for name in _PLAIN_RANKS if name in inputs}
    for name, node in plain.items():
        if len(node.shape) != _PLAIN_RANKS[name] or _dtype(node, path).kind != "i":
            raise BundleError(
                f"{path} wants {name} as {node.type} of shape {_shown(node)}, which is not "
                "supported"
            )
    lora = {n: _lora_shape(i, path) for n, i in inputs.items() if n.startswith("lora.")}
    known = plain.keys() | lora.keys() | {t.past for t in tensors} | {LOGITS_FROM, ATTENTION_ROWS}
    if unknown := sorted(inputs.keys() - known):
        raise BundleError(
            f"{path} has an input {shown_value(unknown[0])} that this runtime cannot feed"
        )
    rows = outputs["logits"].shape[-1]
    if isinstance(rows, int) and rows != num_logits:
        raise BundleError(f"{path} gives {rows} logits, the manifest says {num_logits}")
    hidden = outputs.get("hidden_states")
    optional = inputs.keys() | {i.name for i in session.get_overridable_initializers()}
    return GraphSignature(
        cache=cache or ("shared" if fixed else "concat"),
        cache_tensors=tensors,
        plain_inputs={name: _dtype(node, path) for name, node in plain.items()},
        has_logits_from=LOGITS_FROM in optional,
        has_attention_rows=ATTENTION_ROWS in optional,
        lora_inputs=lora,
        num_logits=num_logits,
        logits_dtype=_dtype(outputs["logits"], path),
        hidden_size=_hidden_size(hidden, path) if hidden else None,
    )


def _cache_tensors(
    inputs: dict[str, Any], outputs: dict[str, Any], path: Path
) -> tuple[CacheTensor, ...]:
    tensors = []
    for name, node in inputs.items():
        match = _PAST.fullmatch(name)
        if match is None:
            continue
        present = f"present.{match[1]}.{match[2]}"
        if present not in outputs:
            raise BundleError(f"{path} takes {name} but does not give {present}")
        if len(node.shape) != 4 or _dtype(node, path).kind != "f":
            raise BundleError(
                f"{path} has {name} as {node.type} of shape {_shown(node)}, which is no cache"
            )
        if outputs[present].type != node.type or len(outputs[present].shape) != 4:
            raise BundleError(f"{path} gives {present} of another kind than {name}")
        _, heads, _, dim = node.shape
        if not (is_size(heads) and is_size(dim)):
            raise BundleError(f"{path} leaves the shape of {name} open: {_shown(node)}")
        tensors.append(
            CacheTensor(
                past=name,
                present=present,
                num_heads=heads,
                head_dim=dim,
                dtype=_dtype(node, path),
            )
        )
    if not tensors:
        raise BundleError(
            f"{path} has no past_key_values inputs: export it with a KV cache "
            "(optimum: task text-generation-with-past)"
        )
    return tuple(tensors)


def _check_rows(node: Any, path: Path) -> None:
    """Refuse an output that is not a row of numbers for every token."""
    if len(node.shape) != 3 or _dtype(node, path).kind != "f":
        raise BundleError(
            f"{path} gives {node.name} as {node.type} of shape {_shown(node)}, must be floats of "
            "[1, tokens, width]: export the model again"
        )


def _hidden_size(node: Any, path: Path) -> int:
    size = node.shape[-1]
    if not is_size(size) or node.type != "tensor(float)":
        raise BundleError(
            f"{path} gives hidden_states as {node.type} of shape {_shown(node)}: export the model "
            "again"
        )
    return int(size)


def _lora_shape(node: Any, path: Path) -> tuple[int, ...]:
    if len(node.shape) != 2 or not all(map(is_size, node.shape)) or node.type != "tensor(float)":
        raise BundleError(
            f"{path} takes {shown_text(node.name)} as {node.type} of shape {_shown(node)}, which "
            "is no factor of an adapter: export the model again"
        )
    return tuple(node.shape)


def _shown(node: Any) -> str:
    return shown_text(str(node.shape))


def _dtype(node: Any, path: Path) -> np.dtype[Any]:
    if node.type not in DTYPES:
        raise BundleError(f"{path} has {node.name} of type {node.type}, which is not supported")
    return DTYPES[node.type]
