"""Integer weights of the HTP flavour, and the scales that cost the layer's output least.

Levels are signed and symmetric. A scale belongs to the whole tensor, to an output channel,
or to a block of 32 inputs of a channel; a block's scale is then a whole number from 1 to 16
times its channel's scale ("low-power block quantisation", LPBQ).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.int8]
Granularity = Literal["tensor", "channel", "block"]

BLOCK = 32
MAX_BLOCK_SCALE = 16
"""Larger whole numbers are accepted by the HTP and give garbage."""

_CANDIDATES = 20
_SMALLEST_FRACTION = {4: 0.5, 8: 0.8}
"""Of the scale that clips nothing; smaller ones never win."""
_LARGEST_FRACTION = 1.05
_ROWS_AT_ONCE_ELEMENTS = 1 << 18
"""What stays in a processor's cache."""
_MAX_ROWS_AT_ONCE = 256
"""Of which BLAS multiplies a block on one thread: with 1,024 rows its threads wait for one another
and took 50 times the processor time on a busy machine."""
_TINY = np.float32(1e-12)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How many bits a weight has, and what shares a scale."""

    bits: Literal[4, 8]
    granularity: Granularity

    @property
    def lowest(self) -> int:
        """Smallest level; 8 bits leave -128 unused, so that no sign is favoured."""
        return -8 if self.bits == 4 else -127

    @property
    def highest(self) -> int:
        """Largest level."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scales of a weight ``[out, in]``."""

    channel: Floats
    """``[out]``, or ``[1]`` for the whole tensor."""
    block: npt.NDArray[np.uint8] | None = None
    """``[out, ceil(in / BLOCK)]`` from 1 to 16; None where there are no blocks."""

    def by_block(self, out: int, blocks: int) -> Floats:
        """``[out, blocks]`` what a level of each block is worth."""
        channel = np.broadcast_to(self.channel[:, None], (out, blocks))
        return channel.copy() if self.block is None else channel * self.block.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class IntegerWeight:
    """A weight ``[out, in]`` as levels and scales."""

    levels: Levels
    """``[out, in]``"""
    scales: Scales
    bits: Literal[4, 8]

    def dequantize(self) -> Floats:
        """The weight that the levels stand for, ``[out, in]``."""
        out, in_features = self.levels.shape
        if self.scales.block is None:
            return self.levels * self.scales.channel[:, None]
        by_block = self.scales.by_block(out, self.scales.block.shape[1])
        return self.levels * np.repeat(by_block, BLOCK, axis=1)[:, :in_features]


def nearest_scales(weight: Floats, form: WeightFormat) -> Scales:
    """The smallest scales that clip no weight: what round-to-nearest goes by."""
    extreme = np.empty((len(weight), -(-weight.shape[1] // BLOCK)), np.float32)
    for rows in _row_slices(weight):
        extreme[rows] = np.abs(_blocked(weight[rows])).max(axis=-1).T
    return _shared(np.maximum(extreme / np.float32(form.highest), _TINY), form)


def search_scales(weight: Floats, form: WeightFormat, moments: Floats) -> Scales:
    """Of 20 candidates for each scale, the ones with the smallest error of the output.

    The error of a block of weights w rounded to w' is ``(w - w')^T E[x x^T] (w - w')``, the
    mean square that the block adds to the output, over calibrated inputs x.

    Args:
        weight: ``[out, in]``
        form: bits and what shares a scale.
        moments: ``[in, in]`` second moments of the inputs.

    Source:
        AIMET's sequential MSE (its candidates: 20 fractions of the largest weight).
    """
    diagonal = block_moments(moments)
    if form.granularity != "block":
        return _search_shared(weight, form, diagonal)
    ideal = np.empty((len(weight), len(diagonal)), np.float32)
    for rows in _row_slices(weight):
        ideal[rows] = _search_blocks(_blocked(weight[rows]), form, diagonal).T
    shared = _shared(ideal, form)
    whole = np.empty(ideal.shape, np.uint8)
    for rows in _row_slices(weight):
        part = _blocked(weight[rows])
        whole[rows] = _search_whole(part, ideal[rows].T, shared.channel[rows], form, diagonal).T
    return Scales(channel=shared.channel, block=whole)


def round_levels(weight: Floats, scales: Scales, form: WeightFormat) -> IntegerWeight:
    """Every weight to its nearest level."""
    out, in_features = weight.shape
    by_block = scales.by_block(out, -(-in_features // BLOCK))
    levels = np.empty(weight.shape, np.int8)
    for rows in _row_slices(weight):
        steps = np.repeat(by_block[rows], BLOCK, axis=1)[:, :in_features]
        levels[rows] = np.clip(np.rint(weight[rows] / steps), form.lowest, form.highest)
    return IntegerWeight(levels=levels, scales=scales, bits=form.bits)


def _search_whole(
    part: Floats, ideal: Floats, channel: Floats, form: WeightFormat, diagonal: Floats
) -> npt.NDArray[np.uint8]:
    """Of the whole numbers around the ideal scale, the ones with the smallest error.

    Args:
        part: ``[blocks, out, BLOCK]`` weights.
        ideal: ``[blocks, out]`` scales found by search.
        channel: ``[out]`` what the whole numbers are multiplied by.
        form: bits and what shares a scale.
        diagonal: ``[blocks, BLOCK, BLOCK]`` second moments of each block's inputs.

    Returns:
        ``[blocks, out]`` from 1 to `MAX_BLOCK_SCALE`.
    """
    middle = np.floor(ideal / channel + np.float32(1e-3))
    options = (np.clip(middle + shift, 1, MAX_BLOCK_SCALE) for shift in (-1, 0, 1, 2))
    best = _least(part, ((option, option * channel) for option in options), form, diagonal)
    return np.asarray(best, np.uint8)


def block_moments(moments: Floats) -> Floats:
    """``[blocks, BLOCK, BLOCK]`` of ``[in, in]``: the part that lies within blocks."""
    blocks = -(-len(moments) // BLOCK)
    padding = blocks * BLOCK - len(moments)
    padded = np.pad(moments, ((0, padding), (0, padding)))
    return np.stack([padded[i : i + BLOCK, i : i + BLOCK] for i in range(0, len(padded), BLOCK)])


def _search_blocks(part: Floats, form: WeightFormat, diagonal: Floats) -> Floats:
    """``[blocks, out]`` best of the candidates for each block by itself."""
    largest = np.maximum(np.abs(part).max(axis=-1) / np.float32(form.highest), _TINY)
    scales = (largest * fraction for fraction in _fractions(form))
    return _least(part, ((scale, scale) for scale in scales), form, diagonal)


def _search_shared(weight: Floats, form: WeightFormat, diagonal: Floats) -> Scales:
    """Best candidate for each channel, or for all of them at once."""
    largest = nearest_scales(weight, form).channel
    best, least = largest, np.full(largest.shape, np.inf, np.float32)
    for fraction in _fractions(form):
        scale = largest * fraction
        error = np.zeros(len(weight), np.float32)
        for rows in _row_slices(weight):
            here = np.broadcast_to(scale, len(weight))[rows]
            error[rows] = _errors(_blocked(weight[rows]), here, form, diagonal).sum(axis=0)
        if form.granularity == "tensor":
            error = error.sum(keepdims=True)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return Scales(channel=best)


def _least(
    part: Floats, options: Iterable[tuple[Floats, Floats]], form: WeightFormat, diagonal: Floats
) -> Floats:
    """For each block of each channel the option (value, scale) whose scale errs least."""
    best: Floats | None = None
    least = np.full(part.shape[:2], np.inf, np.float32)
    for value, scale in options:
        error = _errors(part, scale, form, diagonal)
        best = value if best is None else np.where(error < least, value, best)
        least = np.minimum(error, least)
    assert best is not None
    return best


def _errors(part: Floats, scale: Floats, form: WeightFormat, diagonal: Floats) -> Floats:
    """``[blocks, out]`` mean square error of the output; scale is broadcast to that."""
    steps = scale[..., None]
    error = part - np.clip(np.rint(part / steps), form.lowest, form.highest) * steps
    total: Floats = np.einsum("boi,boi->bo", error @ diagonal, error)
    return total


def _fractions(form: WeightFormat) -> Floats:
    return np.linspace(
        _SMALLEST_FRACTION[form.bits], _LARGEST_FRACTION, _CANDIDATES, dtype=np.float32
    )


def _shared(scales: Floats, form: WeightFormat) -> Scales:
    """``[out, blocks]`` wanted scales as ones that the format can hold, none smaller."""
    if form.granularity == "tensor":
        return Scales(channel=scales.max(keepdims=True).reshape(1))
    if form.granularity == "channel":
        return Scales(channel=scales.max(axis=1))
    channel = scales.max(axis=1) / np.float32(MAX_BLOCK_SCALE)
    whole = np.ceil(scales / channel[:, None] - np.float32(1e-3))
    return Scales(channel=channel, block=np.clip(whole, 1, MAX_BLOCK_SCALE).astype(np.uint8))


def _blocked(weight: Floats) -> Floats:
    """``[blocks, out, BLOCK]`` of ``[out, in]``, filled up with zeros."""
    out, in_features = weight.shape
    blocks = -(-in_features // BLOCK)
    padded = np.pad(weight, ((0, 0), (0, blocks * BLOCK - in_features)))
    return np.ascontiguousarray(padded.reshape(out, blocks, BLOCK).transpose(1, 0, 2))


def _row_slices(weight: Floats) -> Iterator[slice]:
    """Pieces of the rows that the search takes one after the other."""
    step = min(_MAX_ROWS_AT_ONCE, max(1, _ROWS_AT_ONCE_ELEMENTS // weight.shape[1]))
    for start in range(0, len(weight), step):
        yield slice(start, min(start + step, len(weight)))
