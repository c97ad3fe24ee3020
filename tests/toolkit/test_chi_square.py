"""The chi-square test: known values, pooling, and the errors it has to see."""

import math

import numpy as np
import pytest

from omnidraft_npu.chi_square import ChiSquare, chi_square


@pytest.mark.parametrize(
    ("statistic", "num_degrees", "p_value"),
    [
        # One degree: erfc(sqrt(x / 2)); two: exp(-x / 2); four: exp(-x / 2) (1 + x / 2).
        (3.841458820694124, 1, 0.05),
        (0.1, 1, math.erfc(math.sqrt(0.05))),
        (30.0, 1, math.erfc(math.sqrt(15))),
        (0.5, 2, math.exp(-0.25)),
        (40.0, 2, math.exp(-20)),
        (7.0, 4, math.exp(-3.5) * 4.5),
        (2.0, 4, math.exp(-1) * 2),
        (0.0, 3, 1.0),
        (math.inf, 3, 0.0),
        (math.inf, 0, 0.0),
        (0.0, 0, 1.0),
    ],
)
def test_p_values_are_those_of_closed_forms(statistic, num_degrees, p_value):
    found = ChiSquare(statistic=statistic, num_degrees=num_degrees).p_value
    assert found == pytest.approx(p_value, rel=1e-10)


def test_many_degrees_agree_with_the_sum_of_even_ones():
    """For 2 n degrees: exp(-h) times the sum of h^i / i! below n, where h is half of x."""
    for n in (10, 50, 200):
        for x in (n, 2 * n, 3 * n, 4 * n):
            terms = [math.exp(i * math.log(x / 2) - x / 2 - math.lgamma(i + 1)) for i in range(n)]
            found = ChiSquare(statistic=x, num_degrees=2 * n).p_value
            assert found == pytest.approx(sum(terms), rel=1e-9)


def test_rare_outcomes_are_pooled():
    probs = np.array([0.02, 0.5, 0.03, 0.4, 0.05])
    found = chi_square(np.array([3, 45, 2, 45, 5]), probs)
    # Bins of 50 and 40, 5 alone, and 2 and 3 together.
    assert found.num_degrees == 3
    assert found.statistic == pytest.approx(25 / 50 + 25 / 40)


def test_a_rest_too_rare_for_a_bin_joins_the_rarest_bin():
    found = chi_square(np.array([48, 49, 3]), np.array([0.5, 0.48, 0.02]))
    assert found.num_degrees == 1
    assert found.statistic == pytest.approx(4 / 50 + 4 / 50)


def test_too_few_samples_or_one_outcome_say_nothing():
    assert chi_square(np.array([2, 1]), np.array([0.5, 0.5])).p_value == 1
    assert chi_square(np.array([100, 0]), np.array([1.0, 0.0])).p_value == 1


def test_an_outcome_of_no_probability_is_impossible():
    assert chi_square(np.array([50, 1]), np.array([1.0, 0.0])).p_value == 0


def test_right_samples_pass_and_wrong_ones_fail(rng):
    probs = rng.dirichlet(np.full(50, 0.3))
    p_values = []
    for _ in range(300):
        p_values.append(chi_square(rng.multinomial(400, probs), probs).p_value)
    assert 0.4 < np.mean(p_values) < 0.6
    assert np.mean(np.array(p_values) < 0.1) < 0.16
    wrong = 0.7 * probs + 0.3 / 50
    assert chi_square(rng.multinomial(400, wrong), probs).p_value < 1e-6


def test_independent_tests_add_up():
    total = ChiSquare.sum(
        [ChiSquare(statistic=1.5, num_degrees=2), ChiSquare(statistic=2.0, num_degrees=3)]
    )
    assert total == ChiSquare(statistic=3.5, num_degrees=5)
    assert ChiSquare.sum([]).p_value == 1
