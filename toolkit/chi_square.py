"""Do counts follow a law? Pearson's chi-square test, with rare outcomes pooled."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_EXPECTED = 5.0
"""Least expected count of a bin; below it the statistic is not distributed as chi-square."""


@dataclass(frozen=True, kw_only=True)
class ChiSquare:
    """A statistic and its degrees of freedom; independent ones can be added."""

    statistic: float
    num_degrees: int

    @property
    def p_value(self) -> float:
        """How often a right sampler gives a statistic at least as large; 1 without freedom.

        The upper regularised incomplete gamma function of half of both numbers.
        """
        if self.num_degrees == 0:
            return 1.0 if self.statistic == 0 else 0.0
        return _upper_gamma(self.num_degrees / 2, self.statistic / 2)

    @staticmethod
    def sum(parts: "Iterable[ChiSquare]") -> "ChiSquare":
        """The test of all of them together."""
        listed = list(parts)
        return ChiSquare(
            statistic=sum(part.statistic for part in listed),
            num_degrees=sum(part.num_degrees for part in listed),
        )


def chi_square(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> ChiSquare:
    """Compare counts with a law.

    Outcomes are pooled from the rarest on until every bin expects `MIN_EXPECTED`.

    Args:
        counts: ``[n]`` how often each outcome was seen.
        probs: ``[n]`` what each has by the law, summing to 1.

    Returns:
        The statistic; infinite where an outcome of no probability was seen.
    """
    if counts[probs == 0].any():
        return ChiSquare(statistic=math.inf, num_degrees=0)
    expected = probs * counts.sum()
    order = np.argsort(-expected, kind="stable")
    num_alone = int(np.count_nonzero(expected >= MIN_EXPECTED))
    rest = float(expected[order[num_alone:]].sum())
    if rest < MIN_EXPECTED:
        num_alone -= 1
    if num_alone < 1:
        return ChiSquare(statistic=0.0, num_degrees=0)
    alone, pooled = order[:num_alone], order[num_alone:]
    bins = np.append(expected[alone], expected[pooled].sum())
    seen = np.append(counts[alone], counts[pooled].sum())
    return ChiSquare(statistic=float(np.sum((seen - bins) ** 2 / bins)), num_degrees=len(bins) - 1)


def _upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function, by its series or continued fraction."""
    if x <= 0:
        return 1.0
    if math.isinf(x):
        return 0.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - scale * total)
    # Modified Lentz evaluation of 1/(x+1-a- 1(1-a)/(x+3-a- 2(2-a)/(x+5-a- ...
    b = x + 1 - a
    c, d = math.inf, 1 / b
    value = d
    for i in range(1, 10_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return scale * value
