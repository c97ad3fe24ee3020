"""Rotary layout and scaling of GGUF files."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..architecture import Llama3Scaling


def half_split_rows(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of a llama query or key projection, brought back from interleaved pairs.

    The converter of llama.cpp puts the two halves of every head in turns (row 0, row d/2,
    row 1, …), because ggml rotates neighbours for this architecture.

    Args:
        values: ``[num_heads * head_dim, ...]`` a projection or its bias.
        num_heads: heads of the projection; of the keys, the key-value heads.

    Returns:
        The same shape, each head's first half before its second.
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def llama3_scaling(factors: Sequence[float], base: float) -> Llama3Scaling | None:
    """The llama 3 scaling whose frequencies are divided by `factors`, None if there is none.

    A file holds the divisors only. Tried are the two bounds that every Llama 3 has (1 and 4),
    the largest divisor as the factor, and original context lengths that are powers of two.

    Args:
        factors: ``[head_dim / 2]`` from the highest frequency to the lowest.
        base: of the rotary embedding.
    """
    given = np.asarray(factors, np.float64)
    if not (np.isfinite(given).all() and (given >= 1).all()):
        return None
    for power in range(4, 21):
        scaling = Llama3Scaling(
            factor=round(float(given.max()), 3),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context_length=2**power,
        )
        if np.allclose(llama3_factors(scaling, base, 2 * given.size), given, rtol=1e-5, atol=0.0):
            return scaling
    return None


def llama3_factors(scaling: Llama3Scaling, base: float, head_dim: int) -> npt.NDArray[np.float64]:
    """``[head_dim / 2]`` what each rotary frequency is divided by: 1 for the high ones, the
    factor for the low ones, and between them the reciprocal of a blend of both.
    """
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_context_length / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - kept) / scaling.factor + kept))
