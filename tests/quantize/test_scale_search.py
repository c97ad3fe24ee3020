"""Integer weights: what a format can hold, and that searched scales and feedback pay."""

import numpy as np
import pytest

from omnidraft_npu.quantize.error_feedback import inverse_root, round_with_feedback
from omnidraft_npu.quantize.scale_search import (
    BLOCK,
    MAX_BLOCK_SCALE,
    WeightFormat,
    _row_slices,
    nearest_scales,
    round_levels,
    search_scales,
)

FORMATS = [
    WeightFormat(bits=bits, granularity=granularity)
    for bits in (4, 8)
    for granularity in ("tensor", "channel", "block")
]
W4 = WeightFormat(bits=4, granularity="block")


def random_weight(rng, out=48, in_features=96):
    """Channels and inputs of unlike size, with a few outliers."""
    weight = rng.normal(size=(out, in_features)) * rng.uniform(0.2, 2, (out, 1))
    weight[rng.random(weight.shape) < 0.01] *= 6
    return weight.astype(np.float32)


def random_moments(rng, in_features=96):
    """Of inputs that depend on one another, some of them far larger than the rest."""
    mix = rng.normal(size=(12, in_features)) * np.geomspace(0.1, 3, in_features)
    x = rng.normal(size=(1000, 12)) @ mix + 0.3 * rng.normal(size=(1000, in_features))
    x = x.astype(np.float32)
    return x.T @ x / np.float32(len(x))


def output_error(weight, rounded, moments):
    error = (weight - rounded.dequantize()).astype(np.float64)
    return float(np.einsum("oi,ij,oj->", error, moments, error))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_weight_that_is_all_levels_comes_back_exactly(rng, form):
    levels = rng.integers(form.lowest + 1, form.highest + 1, (8, 64)).astype(np.int8)
    levels[:, ::BLOCK] = form.highest
    weight = levels * np.float32(0.25)

    rounded = round_levels(weight, nearest_scales(weight, form), form)

    np.testing.assert_array_equal(rounded.levels, levels)
    np.testing.assert_allclose(rounded.dequantize(), weight, rtol=1e-6)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("in_features", [96, 80])
def test_nearest_errs_by_half_a_step_at_most_and_clips_nothing(rng, form, in_features):
    weight = random_weight(rng, in_features=in_features)
    scales = nearest_scales(weight, form)
    rounded = round_levels(weight, scales, form)

    steps = scales.by_block(len(weight), -(-in_features // BLOCK))
    steps = np.repeat(steps, BLOCK, axis=1)[:, :in_features]
    assert np.all(np.abs(weight - rounded.dequantize()) <= steps * 0.501)


@pytest.mark.parametrize("in_features", [96, 80])
def test_block_scales_are_whole_numbers_the_htp_can_multiply_by(rng, in_features):
    """Larger than 16 is garbage on the HTP; 0 would be a block of nothing."""
    weight = random_weight(rng, in_features=in_features)
    moments = random_moments(rng, in_features)
    for scales in (
        nearest_scales(weight, W4),
        search_scales(weight, W4, moments),
        round_with_feedback(
            weight, search_scales(weight, W4, moments), W4, inverse_root(moments)
        ).scales,
    ):
        assert scales.block.dtype == np.uint8
        assert scales.block.shape == (len(weight), -(-in_features // BLOCK))
        assert scales.block.min() >= 1
        assert scales.block.max() <= MAX_BLOCK_SCALE


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_search_beats_nearest_and_feedback_beats_search(rng, form):
    """Of a sum of squares over all outputs; the search sees blocks only, feedback all inputs."""
    weight, moments = random_weight(rng), random_moments(rng)
    nearest = round_levels(weight, nearest_scales(weight, form), form)
    scales = search_scales(weight, form, moments)
    searched = round_levels(weight, scales, form)
    fed_back = round_with_feedback(weight, scales, form, inverse_root(moments))

    errors = [output_error(weight, w, moments) for w in (nearest, searched, fed_back)]
    assert errors[1] < errors[0] * (0.9 if form.bits == 4 else 1.02)
    assert errors[2] < errors[1] * 0.8


def test_search_finds_the_best_of_its_candidates(rng):
    """Against trying all of them one by one, for a single block."""
    weight, moments = random_weight(rng, out=6, in_features=BLOCK), random_moments(rng, BLOCK)
    form = WeightFormat(bits=4, granularity="channel")
    found = search_scales(weight, form, moments).channel
    for row, scale in zip(weight, found, strict=True):
        candidates = np.abs(row).max() / 7 * np.linspace(0.5, 1.05, 20)
        errors = []
        for candidate in candidates:
            error = row - np.clip(np.rint(row / candidate), -8, 7) * candidate
            errors.append(error @ moments @ error)
        assert scale == pytest.approx(candidates[int(np.argmin(errors))], rel=1e-5)


@pytest.mark.parametrize("in_features", [1, 63, 64, 200])
def test_the_inverse_root_is_upper_triangular_and_undoes_the_moments(rng, in_features):
    moments = random_moments(rng, in_features)
    root = inverse_root(moments).astype(np.float64)

    damped = moments + 0.01 * np.trace(moments) / in_features * np.eye(in_features)
    np.testing.assert_allclose(root.T @ root @ damped, np.eye(in_features), atol=1e-3)
    assert not np.tril(root, -1).any()


@pytest.mark.parametrize("in_features", [32, 576, 2048])
def test_the_search_hands_blas_no_product_that_it_would_share_among_threads(in_features):
    """1,024 rows of 2,048 inputs took 52 s of processor time instead of 1: OpenBLAS starts
    threads above 2^18 multiplications, and they mostly waited for one another."""
    rows = max(
        len(range(*part.indices(5000))) for part in _row_slices(np.empty((5000, in_features)))
    )

    assert rows * BLOCK * BLOCK <= 1 << 18


def test_inputs_that_never_vary_are_no_obstacle(rng):
    """Dead inputs leave the moments singular; their weights still get a level."""
    weight, moments = random_weight(rng), random_moments(rng)
    moments[10:20], moments[:, 10:20] = 0, 0
    rounded = round_with_feedback(
        weight, search_scales(weight, W4, moments), W4, inverse_root(moments)
    )

    assert np.isfinite(rounded.dequantize()).all()
    zeros = np.zeros_like(moments)
    rounded = round_with_feedback(weight, search_scales(weight, W4, zeros), W4, inverse_root(zeros))
    assert np.isfinite(rounded.dequantize()).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_weight_of_zeros_stays_zero(form):
    zeros, moments = np.zeros((4, 64), np.float32), np.eye(64, dtype=np.float32)
    scales = search_scales(zeros, form, moments)

    assert not round_with_feedback(zeros, scales, form, inverse_root(moments)).dequantize().any()
