"""The likeliest logits are found by the largest of each group, none left out."""

import numpy as np
import pytest

from omnidraft_npu.peaks import Peaks

SIZES = [1, 100, 32_767, 32_768, 40_000, 40_960]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.9, 1.0])
def test_all_logits_above_a_bound_are_found_and_no_others(rng, size, share):
    logits = rng.normal(size=size).astype(np.float32)
    bound = np.quantile(logits, 1 - share)
    assert Peaks(logits).max == logits.max()
    np.testing.assert_array_equal(
        np.sort(Peaks(logits).at_least(bound)), np.flatnonzero(logits >= bound)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 50, 4096, 5000])
def test_the_floor_of_a_count_is_one_that_as_many_are_not_below(rng, size, count):
    logits = rng.normal(size=size).astype(np.float32)
    floor = Peaks(logits).floor(count)
    assert (logits >= floor).sum() >= min(count, size)
    if count <= 50 and size >= 32_768:
        assert (logits >= floor).sum() < 2 * count + 10


@pytest.mark.parametrize("size", [100, 40_001])
def test_indices_rise(rng, size):
    logits = rng.normal(size=size).astype(np.float32)
    ids = Peaks(logits).at_least(2.0)
    assert (np.diff(ids) > 0).all()
