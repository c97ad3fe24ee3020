"""Block-wise integer weights in the layout of MatMulNBits and GatherBlockQuantized.

A row is cut into blocks of 32 along its input features; a block has one float32 scale
and stands for ``(level - zero_point) * scale`` with unsigned levels of 4 or 8 bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Bits = Literal[4, 8]

BLOCK = 32

_ROWS_AT_ONCE_ELEMENTS = 1 << 21
_STEPS: dict[Bits, tuple[float, ...]] = {
    8: (255, 240, 225),
    4: tuple(15 / np.linspace(0.80, 1.04, 13)),
}
"""Steps a block's own range is cut into. Multiples of 15 keep the steps of a 4-bit source;
with 4 bits, clipping the extremes or leaving levels unused can be the smaller error."""


@dataclass(frozen=True, kw_only=True)
class BlockQuantized:
    """A weight ``[out, in]`` as levels and scales."""

    packed: Bytes
    """``[out, blocks, BLOCK * bits / 8]``; of two 4-bit levels in a byte the first is low."""
    scales: Floats
    """``[out, blocks]``"""
    zero_points: Bytes
    """``[out, ceil(blocks * bits / 8)]``, packed like the levels."""
    bits: Bits
    in_features: int
    """Columns of the weight; the last block is filled up with zeros."""

    def dequantize(self) -> Floats:
        """The weight that the levels stand for, ``[out, in]``."""
        out, blocks = self.scales.shape
        levels = _unpack(self.packed, self.bits).astype(np.float32)
        zeros = _unpack(self.zero_points, self.bits)[:, :blocks, None].astype(np.float32)
        weight = (levels - zeros) * self.scales[:, :, None]
        return weight.reshape(out, -1)[:, : self.in_features]


def quantize_blocks(
    weight: Floats, bits: Bits, *, importance: Floats | None = None
) -> BlockQuantized:
    """Round every weight to the nearest level of its block, zero to zero.

    Of several ranges around the block's own, each refitted by least squares to the levels
    it leads to, the block gets the one with the smallest (weighted) squared error. Q8_0 and Q4_0
    sources come back exactly, other 4-bit sources nearly so with 8 bits.

    Args:
        weight: ``[out, in]``; `in` need not be a multiple of the block.
        bits: of a level.
        importance: ``[in]`` what an error costs, up to a factor; None for all alike.
    """
    out, in_features = weight.shape
    blocks = -(-in_features // BLOCK)
    padding = (0, blocks * BLOCK - in_features)
    cost = np.ones(in_features, np.float32) if importance is None else importance
    cost = np.pad(cost / max(cost.max(), np.float32(1e-30)) + np.float32(1e-6), padding)
    packed = np.empty((out, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.empty((out, blocks), np.float32)
    zeros = np.empty((out, blocks), np.uint8)
    for rows in _row_slices(out, blocks * BLOCK):
        part = np.pad(weight[rows], ((0, 0), padding)).reshape(-1, blocks, BLOCK)
        fit = _fit(part, cost.reshape(blocks, BLOCK), bits)
        packed[rows] = _pack(fit.levels, bits)
        scales[rows] = fit.scale[..., 0]
        zeros[rows] = fit.zero[..., 0]
    return BlockQuantized(
        packed=packed,
        scales=scales,
        zero_points=_pack(zeros, bits),
        bits=bits,
        in_features=in_features,
    )


class _Candidates:
    """For every block of a part, the scale, zero point and levels that fit it best so far."""

    def __init__(self, part: Floats, cost: Floats, bits: Bits) -> None:
        """Args: part is ``[rows, blocks, BLOCK]``, cost ``[blocks, BLOCK]``."""
        self._part = part
        self._weighted = part * cost
        self._cost = cost
        self._top = np.float32((1 << bits) - 1)
        self._gain = np.full((*part.shape[:2], 1), -1, np.float32)
        self.scale = np.zeros_like(self._gain)
        self.zero = np.zeros(self._gain.shape, np.uint8)
        self.levels = np.zeros(part.shape, np.uint8)

    def offer(self, scale: Floats, zero: Floats) -> None:
        """Round with this scale, then refit it: ``w . q / q . q`` for the levels q.

        The refit takes ``(w . q)^2 / q . q`` off the squared error, all products weighted.
        """
        inverse = _divide(np.ones_like(scale), scale)
        signed = np.clip(np.rint(self._part * inverse), -zero, self._top - zero)
        product = np.einsum("rbk,rbk->rb", self._weighted, signed)[..., None]
        square = np.einsum("rbk,bk->rb", signed * signed, self._cost)[..., None]
        scale = _divide(product, square)
        gain = scale * product
        is_better = (gain > self._gain)[..., 0]
        self._gain[is_better] = gain[is_better]
        self.scale[is_better] = scale[is_better]
        self.zero[is_better] = zero[is_better].astype(np.uint8)
        self.levels[is_better] = (signed[is_better] + zero[is_better]).astype(np.uint8)


def _fit(part: Floats, cost: Floats, bits: Bits) -> _Candidates:
    """Try the symmetric range of Q8_0 and Q4_0, then ranges from lowest to highest weight."""
    low = np.minimum(part.min(axis=-1, keepdims=True), 0)
    high = np.maximum(part.max(axis=-1, keepdims=True), 0)
    top = np.float32((1 << bits) - 1)
    best = _Candidates(part, cost, bits)
    middle = np.float32(1 << (bits - 1))
    if bits == 8:
        best.offer(np.maximum(-low, high) / (middle - 1), np.full_like(low, middle))
    else:
        zero = np.where(-low >= high, middle, middle - 1)
        best.offer(np.maximum(-low, high) / middle, zero)
    for steps in _STEPS[bits]:
        scale = (high - low) / np.float32(steps)
        best.offer(scale, np.clip(np.rint(_divide(-low, scale)), 0, top))
    return best


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """Quotient, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator != 0)


def _pack(levels: Bytes, bits: Bits) -> Bytes:
    """Levels along the last axis as bytes; an odd one out is paired with 0."""
    if bits == 8:
        return levels
    if levels.shape[-1] % 2:
        levels = np.concatenate([levels, np.zeros_like(levels[..., :1])], axis=-1)
    high: Bytes = np.left_shift(levels[..., 1::2], 4, dtype=np.uint8)
    return levels[..., 0::2] | high


def _unpack(packed: Bytes, bits: Bits) -> Bytes:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Pieces of the rows that bound the memory of the search."""
    step = max(1, _ROWS_AT_ONCE_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
