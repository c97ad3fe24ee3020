"""Scale and zero point of every activation, equal where a value is only moved or cached."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from .ranges import Ranges

if TYPE_CHECKING:
    import onnx

ActivationBits = Literal[8, 16]

MOVING = ("Reshape", "Transpose", "Concat")
"""Operators that compute nothing: what they take and give has one encoding."""
_FIXED = {"Softmax": (0.0, 1.0), "Sigmoid": (0.0, 1.0)}
_HEADROOM = 1.1
"""Of the range seen: other text, and adapters, go a little further; 16 bits can spare it."""
_ATTENTION = re.compile(
    r"layers\.\d+\.(query_rotated|scores|masked|weights|attended_grouped)"
    r"|(attention|sliding)_mask(\.grouped)?"
)
_PAST, _NEW = "past_key_values.", "new."


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Unsigned levels stand for ``(level - zero_point) * scale``."""

    bits: ActivationBits
    scale: float
    zero_point: int

    @classmethod
    def of_range(
        cls, low: float, high: float, bits: ActivationBits, *, is_symmetric: bool = False
    ) -> "Encoding":
        """The finest encoding that holds zero exactly and everything from `low` to `high`."""
        top = (1 << bits) - 1
        low, high = min(low, 0.0), max(high, 0.0)
        if is_symmetric:
            largest = max(-low, high, 1e-8)
            return cls(bits=bits, scale=largest / (top // 2), zero_point=1 << (bits - 1))
        scale = float(np.float32(max(high - low, 1e-8) / top))
        return cls(bits=bits, scale=scale, zero_point=round(-low / scale))

    def times(self, *others: "Encoding") -> "Encoding":
        """An encoding for products of a value of this one with one of any of the others."""
        factor = max(other.largest for other in others)
        limit = self.largest * factor
        return Encoding.of_range(-limit, limit, 16)

    @property
    def largest(self) -> float:
        """The largest magnitude a level stands for."""
        return self.scale * max(self.zero_point, (1 << self.bits) - 1 - self.zero_point)

    @property
    def dtype(self) -> npt.DTypeLike:
        """Of the levels."""
        return np.uint8 if self.bits == 8 else np.uint16

    def levels(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8 | np.uint16]:
        """The nearest level of every value."""
        # In place: the embedding of a large vocabulary is a gigabyte.
        rounded = np.asarray(values / np.float32(self.scale))
        np.rint(rounded, out=rounded)
        rounded += np.float32(self.zero_point)
        np.clip(rounded, 0, (1 << self.bits) - 1, out=rounded)
        levels: npt.NDArray[np.uint8 | np.uint16] = rounded.astype(self.dtype)
        return levels


def is_lora(name: str) -> bool:
    """Whether a value belongs to a LoRA branch, which is kept out of quantisation.

    Its range depends on the adapter, and no adapter is known yet.
    """
    return name.startswith("lora.") or name.endswith((".lora_low", ".lora"))


def is_residual(name: str) -> bool:
    """Whether a value is the stream that layers add to.

    The first token of a text has values there of thousands of times the others' (27,000 in
    SmolLM2-135M, where the others are around 10), and one scale for both leaves few steps for
    the others, at every one of some sixty additions.
    """
    return name.endswith((".attention_residual", ".residual"))


def is_attention(name: str) -> bool:
    """Whether a value lies between the rotated queries and what they attend to, masks included."""
    return _ATTENTION.fullmatch(name) is not None


def is_cache_input(name: str) -> bool:
    """Whether a graph input is a part of the cache."""
    return name.startswith(_PAST)


def is_cache_output(name: str) -> bool:
    """Whether a value is new rows for the cache."""
    return name.startswith(_NEW) and not name.endswith((".heads", ".raw"))


def raw(name: str) -> str:
    """New rows of the cache before they are brought to the cache's own encoding."""
    return f"{name}.raw"


def encode(
    graph: "onnx.GraphProto",
    ranges: Ranges,
    constants: Ranges,
    *,
    kv_bits: ActivationBits,
    has_float_residual: bool,
    has_float_attention: bool,
) -> dict[str, Encoding]:
    """An encoding for every value that becomes integers, in the graphs of all lengths.

    The cache and its new rows have one encoding, with zero in the middle, so that an empty
    slot of any model is the same integer.

    Args:
        graph: A float graph of the HTP contract.
        ranges: Of activations; see `collect_ranges`.
        constants: Of the float constants that activations are looked up in (`Gather`).
        kv_bits: Of the cache.
        has_float_residual: Whether the residual stream stays in floating point.
        has_float_attention: Whether scores and weights of the attention do.

    Returns:
        By name of value or constant. With an 8-bit cache the new rows are there twice: as
        `raw` says with 16 bits, as the operator that gives them needs it, and with 8.
    """
    groups = _Groups()
    for node in graph.node:
        for output in node.output:
            made = raw(output) if is_cache_output(output) else output
            if node.op_type in MOVING:
                moved = node.input if node.op_type == "Concat" else node.input[:1]
                for name in moved:
                    groups.join(name, made)
            elif node.op_type == "Gather":
                groups.join(node.input[0], made)
            if is_cache_output(output) and kv_bits == 16:
                groups.join(made, output)
    limits = dict(constants)
    for node in graph.node:
        for output in node.output:
            low, high = _FIXED.get(node.op_type, ranges[output])
            limits[output] = (low, high)
            if is_cache_output(output):
                limits[raw(output)] = (low, high)
    limits |= {v.name: ranges[v.name] for v in graph.input if v.name in ranges}
    cached = {
        groups.root(output)
        for node in graph.node
        for output in node.output
        if is_cache_output(output)
    }
    for name in [v.name for v in graph.input if is_cache_input(v.name)]:
        limits[name] = limits[name.replace(_PAST, _NEW)]
    widest: Ranges = {}
    for name, (low, high) in limits.items():
        root = groups.root(name)
        lowest, highest = widest.get(root, (0.0, 0.0))
        widest[root] = (min(lowest, low), max(highest, high))
    exact = {groups.root(name) for name in constants}
    fixed = {groups.root(o) for n in graph.node if n.op_type in _FIXED for o in n.output}
    masks = {v.name for v in graph.input if v.name.endswith("_mask")}
    made_of: dict[str, Encoding] = {}
    for root, (low, high) in widest.items():
        spare = 1.0 if root in exact | fixed | masks else _HEADROOM
        is_cached = root in cached
        bits: ActivationBits = kv_bits if is_cached else 16
        made_of[root] = Encoding.of_range(low * spare, high * spare, bits, is_symmetric=is_cached)
    return {
        name: made_of[groups.root(name)]
        for name in limits
        if not is_lora(name)
        and not (has_float_residual and is_residual(name))
        and not (has_float_attention and is_attention(name))
    }


class _Groups:
    """Names that stand for one another."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def root(self, name: str) -> str:
        while (parent := self._parent.get(name, name)) != name:
            name = parent
        return name

    def join(self, one: str, other: str) -> None:
        self._parent[self.root(one)] = self.root(other)
