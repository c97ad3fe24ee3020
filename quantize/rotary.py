"""Cosines and sines of the rotary embedding, for every flavour of graph."""

import numpy as np
import numpy.typing as npt

from .architecture import Llama3Scaling, RopeConfig

Floats = npt.NDArray[np.float32]


def rotary_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[Floats, Floats]:
    """Cosine and sine of every position and frequency.

    Angles are float32 products, as in transformers: at long positions their rounding is
    part of what a model was trained with.

    Returns:
        Two tables ``[length, head_dim / 2]``, for the half-split layout.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / np.power(np.float32(rope.base), exponents)
    frequencies /= np.float32(rope.linear_factor)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


def _stretch(frequencies: Floats, scaling: Llama3Scaling) -> Floats:
    """Slow waves are slowed by `factor`, fast ones kept, those between interpolated.

    Source:
        Llama 3.1 reference implementation, `apply_scaling`.
    """
    turns = scaling.original_context_length * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    stretched: Floats = (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)
    return stretched
