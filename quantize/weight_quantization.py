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
_SHRINKS = np.linspace(0.80, 1.04, 13, dtype=np.float32)
"""Fractions of the full range that are tried as the range of a 4-bit block."""


@dataclass(frozen=True, kw_only=True)
class BlockQuantized:
    """A weight ``[out, in]`` as levels and scales."""

    packed: Bytes
    """``[out, blocks, BLOCK * bits / 8]``; of two 4-bit levels in a byte the first is low."""
    scales: Floats
    """``[out, blocks]``"""
    zero_points: Bytes | None
    """``[out, ceil(blocks * bits / 8)]``, packed like the levels; None stands for the middle level."""
    bits: Bits
    in_features: int
    """Columns of the weight; the last block is filled up with zeros."""

    def dequantize(self) -> Floats:
        """The weight that the levels stand for, ``[out, in]``."""
        out, blocks = self.scales.shape
        levels = _unpack(self.packed, self.bits).astype(np.float32)
        zeros: Floats | np.float32 = np.float32(1 << (self.bits - 1))
        if self.zero_points is not None:
            zeros = _unpack(self.zero_points, self.bits)[:, :blocks, None].astype(np.float32)
        weight = (levels - zeros) * self.scales[:, :, None]
        return weight.reshape(out, -1)[:, : self.in_features]


def quantize_blocks(weight: Floats, bits: Bits, *, has_zero_points: bool = False) -> BlockQuantized:
    """Round every weight to the nearest level of its block.

    8 bits: the scale is the largest magnitude / 127. That gives Q8_0 sources back exactly.
    4 bits: of several ranges around the block's own, each refitted by least squares to the
    levels it leads to, the one with the smallest squared error.

    Args:
        weight: ``[out, in]``; `in` need not be a multiple of the block.
        bits: of a level.
        has_zero_points: levels need not be symmetric around the middle one (4 bits only).
    """
    out, in_features = weight.shape
    blocks = -(-in_features // BLOCK)
    packed = np.empty((out, blocks, BLOCK * bits // 8), np.uint8)
    scales = np.empty((out, blocks), np.float32)
    zeros = np.empty((out, blocks), np.uint8) if has_zero_points else None
    for rows in _row_slices(out, blocks * BLOCK):
        part = np.zeros((rows.stop - rows.start, blocks * BLOCK), np.float32)
        part[:, :in_features] = weight[rows]
        part = part.reshape(-1, BLOCK)
        if bits == 8:
            scale, levels, zero = _nearest_int8(part)
        elif has_zero_points:
            scale, levels, zero = _best_asymmetric_int4(part)
        else:
            scale, levels, zero = _best_symmetric_int4(part)
        packed[rows] = _pack(levels.reshape(-1, blocks, BLOCK), bits)
        scales[rows] = scale.reshape(-1, blocks)
        if zeros is not None:
            zeros[rows] = zero.reshape(-1, blocks)
    return BlockQuantized(
        packed=packed,
        scales=scales,
        zero_points=None if zeros is None else _pack(zeros, bits),
        bits=bits,
        in_features=in_features,
    )


def _nearest_int8(blocks: Floats) -> tuple[Floats, Bytes, Bytes]:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    levels = np.rint(_divide(blocks, scale)) + 128
    return scale, levels.astype(np.uint8), np.full(len(blocks), 128, np.uint8)


def _best_symmetric_int4(blocks: Floats) -> tuple[Floats, Bytes, Bytes]:
    """Signed levels -8..7; the longer side of the range belongs to the largest magnitude."""
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    best = _Best(blocks)
    for shrink in _SHRINKS:
        scale = peak * (shrink / np.float32(-8))
        best.offer(np.clip(np.rint(_divide(blocks, scale)), -8, 7), np.float32(8))
    return best.scale, best.levels, np.full(len(blocks), 8, np.uint8)


def _best_asymmetric_int4(blocks: Floats) -> tuple[Floats, Bytes, Bytes]:
    """Levels 0..15 around a whole zero point, so that zero stays zero."""
    low = np.minimum(blocks.min(axis=1, keepdims=True), 0)
    high = np.maximum(blocks.max(axis=1, keepdims=True), 0)
    best = _Best(blocks)
    for shrink in _SHRINKS:
        scale = (high - low) * (shrink / np.float32(15))
        zero = np.clip(np.rint(_divide(-low, scale)), 0, 15)
        best.offer(np.clip(np.rint(_divide(blocks, scale)), -zero, 15 - zero), zero)
    return best.scale, best.levels, best.zero


class _Best:
    """For every block, the candidate with the smallest squared error so far."""

    def __init__(self, blocks: Floats) -> None:
        self._blocks = blocks
        self._gain = np.full((len(blocks), 1), -1, np.float32)
        self.scale = np.zeros((len(blocks), 1), np.float32)
        self.levels = np.zeros(blocks.shape, np.uint8)
        self.zero = np.zeros((len(blocks), 1), np.uint8)

    def offer(self, signed: Floats, zero: Floats | np.float32) -> None:
        """Fit a scale to `signed` levels; the error it removes is ``(w . q)^2 / q . q``."""
        product = np.einsum("ij,ij->i", self._blocks, signed)[:, None]
        square = np.einsum("ij,ij->i", signed, signed)[:, None]
        scale = _divide(product, square)
        gain = scale * product
        better = (gain > self._gain)[:, 0]
        self._gain[better] = gain[better]
        self.scale[better] = scale[better]
        self.levels[better] = (signed + zero)[better].astype(np.uint8)
        self.zero[better] = np.broadcast_to(zero, scale.shape)[better].astype(np.uint8)


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """Quotient, 0 where the denominator is 0."""
    safe = np.where(denominator == 0, np.float32(1), denominator)
    return np.where(denominator == 0, np.float32(0), numerator / safe).astype(np.float32)


def _pack(levels: Bytes, bits: Bits) -> Bytes:
    """Levels along the last axis as bytes; an odd one out is paired with 0."""
    if bits == 8:
        return levels
    if levels.shape[-1] % 2:
        levels = np.concatenate([levels, np.zeros_like(levels[..., :1])], axis=-1)
    return levels[..., 0::2] | (levels[..., 1::2] << 4)


def _unpack(packed: Bytes, bits: Bits) -> Bytes:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Pieces of the rows that bound the memory of the search."""
    step = max(1, _ROWS_AT_ONCE_ELEMENTS // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
