"""Rounding a weight input by input, each error made good by the inputs not yet rounded.

The rounding of one input's column leaves an error in every output; the columns after it are
moved by what, over the calibrated inputs, undoes most of it.
"""

import numpy as np

from .scale_search import BLOCK, Floats, IntegerWeight, Levels, Scales, WeightFormat

_DAMPING = 0.01
"""Added to the diagonal of the moments, of its mean: keeps inputs that hardly vary solvable."""
_SMALL = 32
"""Inputs up to twice this many are inverted in one go."""


def round_with_feedback(
    weight: Floats, scales: Scales, form: WeightFormat, upper: Floats
) -> IntegerWeight:
    """Levels whose common error of the output is small, at given scales.

    Args:
        weight: ``[out, in]``
        scales: of the weight.
        form: bits and what shares a scale.
        upper: ``[in, in]`` the `inverse_root` of the moments of the inputs.

    Source:
        Frantar et al. 2022, arXiv:2210.17323, algorithm 1.
    """
    rest = weight.copy()
    levels = np.empty(weight.shape, np.int8)
    by_block = scales.by_block(len(weight), -(-weight.shape[1] // BLOCK))
    for block, start in enumerate(range(0, weight.shape[1], BLOCK)):
        columns = slice(start, min(start + BLOCK, weight.shape[1]))
        levels[:, columns], errors = _round_block(
            rest[:, columns], by_block[:, block], form, upper[columns, columns]
        )
        rest[:, columns.stop :] -= errors @ upper[columns, columns.stop :]
    return IntegerWeight(levels=levels, scales=scales, bits=form.bits)


def _round_block(
    part: Floats, steps: Floats, form: WeightFormat, upper: Floats
) -> tuple[Levels, Floats]:
    """Round the columns of ``[out, columns]`` in turn; their levels and scaled errors."""
    part = np.ascontiguousarray(part.T)
    levels = np.empty(part.shape, np.int8)
    errors = np.empty_like(part)
    for i, column in enumerate(part):
        levels[i] = np.clip(np.rint(column / steps), form.lowest, form.highest)
        errors[i] = (column - levels[i] * steps) / upper[i, i]
        part[i + 1 :] -= np.outer(upper[i, i + 1 :], errors[i])
    return levels.T, errors.T


def inverse_root(moments: Floats) -> Floats:
    """Upper triangular U with ``U^T U`` the inverse of the damped moments.

    With ``R R^T`` the damped moments and R upper triangular, U is the inverse of R: less than
    half the work of inverting the moments and taking the root of that.

    Args:
        moments: ``[in, in]`` second moments of the inputs.
    """
    return _invert_upper(_root(moments))


def _root(moments: Floats) -> Floats:
    """Upper triangular R with ``R R^T`` the damped moments; found in double precision."""
    damped = moments.astype(np.float64)
    damping = _DAMPING * float(np.trace(moments)) / len(moments) + 1e-12
    damped[np.diag_indices_from(damped)] += damping
    root = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return np.ascontiguousarray(root, np.float32)


def _invert_upper(matrix: Floats) -> Floats:
    """Inverse of an upper triangular matrix, by quarters."""
    half = len(matrix) // 2
    if half < _SMALL:
        return np.linalg.inv(matrix)
    inverse = np.zeros_like(matrix)
    inverse[:half, :half] = _invert_upper(matrix[:half, :half])
    inverse[half:, half:] = _invert_upper(matrix[half:, half:])
    inverse[:half, half:] = -inverse[:half, :half] @ matrix[:half, half:] @ inverse[half:, half:]
    return inverse
