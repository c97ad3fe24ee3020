"""Exact laws of programs that draw random numbers: every outcome with its rational probability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import pytest
from markov_model import MarkovModel

from omnidraft_npu import sampling, speculative, verification
from omnidraft_npu.bridge import walk
from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.token_law import TokenLaw

Outcome = TypeVar("Outcome", bound=Hashable)


class BranchingGenerator:
    """Stands in for numpy's generator: its numbers are undecided until they are compared.

    A comparison that could go either way follows the script, and past its end goes one way
    and notes the other as a script for another run.
    """

    def __init__(self, script: tuple[bool, ...]) -> None:
        self.script = script
        self.taken: tuple[bool, ...] = ()
        self.probability = Fraction(1)
        self.unexplored: list[tuple[bool, ...]] = []

    def random(self) -> Undecided:
        return Undecided(self)

    def decide(self, probability: Fraction) -> bool:
        at = len(self.taken)
        if at == len(self.script):
            self.script += (True,)
            self.unexplored.append((*self.taken, False))
        choice = self.script[at]
        self.taken += (choice,)
        self.probability *= probability if choice else 1 - probability
        return choice


class Undecided:
    """A uniform number between 0 and 1, known only as far as comparisons have told."""

    def __init__(self, generator: BranchingGenerator) -> None:
        self.generator = generator
        self.low, self.high = Fraction(0), Fraction(1)
        self.scale: Any = Fraction(1)
        self.shift: Any = Fraction(0)

    def __mul__(self, factor: Any) -> Undecided:
        assert not isinstance(factor, float), "a float among fractions"
        self.scale *= factor
        return self

    def __sub__(self, number: Any) -> Undecided:
        self.shift -= number
        return self

    def __lt__(self, bound: Any) -> bool:
        if bound is self:  # searchsorted asks this
            return False
        bound = bound - self.shift
        if self.scale == 0:
            return bool(bound > 0)
        bound = bound / self.scale
        if self.high <= bound or self.low >= bound:
            return self.high <= bound
        is_less = self.generator.decide((bound - self.low) / (self.high - self.low))
        self.low, self.high = (self.low, bound) if is_less else (bound, self.high)
        return is_less

    def __gt__(self, bound: Any) -> bool:
        return bound is not self and not self < bound


def exact_law(run: Callable[[BranchingGenerator], Outcome]) -> dict[Outcome, Fraction]:
    """The probability of every result of `run`, which must be determined by its generator."""
    law: Counter[Outcome] = Counter()
    scripts: list[tuple[bool, ...]] = [()]
    while scripts:
        generator = BranchingGenerator(scripts.pop())
        law[run(generator)] += generator.probability
        scripts += generator.unexplored
    assert sum(law.values()) == 1
    return dict(law)


def random_law(rng: np.random.Generator, size: int) -> np.ndarray:
    """``[size]`` fractions that sum to 1; some may be 0."""
    counts = rng.integers(0, 5, size)
    counts[rng.integers(size)] += 1
    return np.array([Fraction(int(n), int(counts.sum())) for n in counts])


class ExactModel(MarkovModel):
    """Rows of probabilities, in fractions, in place of logits."""

    def __init__(self, rng: np.random.Generator, size: int, *, history: int = 3) -> None:
        super().__init__(np.zeros((7, size)), history=history)
        self.table = np.array([random_law(rng, size) for _ in range(7)])

    def law_after(self, context: Sequence[int]) -> np.ndarray:
        self.cache = list(context)
        return self.table[self._row()]


class _ExactRows:
    def __init__(self, *_: object) -> None:
        pass

    def observe(self, token_ids: Sequence[int]) -> None:
        pass

    def rows(self, logits: np.ndarray, draft_ids: Sequence[int]) -> _ExactRows:
        assert len(logits) == len(draft_ids) + 1
        self._rows = logits
        return self

    def law(self, row: int) -> TokenLaw:
        return TokenLaw(self._rows[row])


def _allowed(weights: np.ndarray, *_: object) -> np.ndarray:
    """In place of logits come weights; where one is ruled out as a logit is, it is 0."""
    return np.where(weights == -np.inf, Fraction(0), weights)


_SAMPLING = SamplingConfig(temperature=1.0)


@contextmanager
def exact_arithmetic(
    max_thinned: int = 0, sampling_of_drafts: SamplingConfig = _SAMPLING, max_drawn: int = 0
) -> Iterator[pytest.MonkeyPatch]:
    """Decoding takes the rows of `ExactModel` for laws, in both models.

    Every draw that may be repeated multiplies the outcomes, so there are few. The target's law
    is its row whatever options leave out of the drafter's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_exponentials", _allowed)
        patch.setattr(speculative, "TargetLaw", _ExactRows)
        patch.setattr(verification, "_MAX_THINNED", max_thinned)
        patch.setattr(walk, "_MAX_DRAWN", max_drawn)
        patch.setitem(globals(), "_SAMPLING", sampling_of_drafts)
        yield patch


def generate_exactly(
    generator: BranchingGenerator,
    proposer: speculative.Proposer,
    target: ExactModel,
    prompt: Sequence[int],
    k: int,
) -> Iterator[speculative.Round]:
    """`generate` with this generator; a context that never ends."""
    target.rewind(0)
    config = DecodeConfig(max_new_tokens=1000, max_draft_tokens=k, sampling=_SAMPLING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: generator)
        rounds = speculative.generate(proposer, target, prompt, config)
        first = next(rounds)
    yield first
    yield from rounds


def law_of_one_round(
    proposer: speculative.Proposer, target: ExactModel, prompt: Sequence[int], k: int
) -> dict[tuple[int, ...], Fraction]:
    """Every sequence of tokens that a round can emit, with its probability."""
    return exact_law(
        lambda generator: (
            next(generate_exactly(generator, proposer, target, prompt, k)).verdict.token_ids
        )
    )


def law_of_tokens(
    make_proposer: Callable[[Sequence[int]], speculative.Proposer],
    target: ExactModel,
    prompt: Sequence[int],
    k: int,
    num_tokens: int,
) -> dict[tuple[int, ...], Fraction]:
    """The joint law of the first tokens of a response, over as many rounds as it takes."""
    law: Counter[tuple[int, ...]] = Counter()
    for emitted, probability in law_of_one_round(make_proposer(prompt), target, prompt, k).items():
        head = emitted[:num_tokens]
        missing = num_tokens - len(head)
        rest = {(): Fraction(1)}
        if missing:
            rest = law_of_tokens(make_proposer, target, [*prompt, *head], k, missing)
        for tail, factor in rest.items():
            law[(*head, *tail)] += probability * factor
    return dict(law)


def law_of_target(
    target: ExactModel, prompt: Sequence[int], num_tokens: int
) -> dict[tuple[int, ...], Fraction]:
    """The same of the target alone."""
    if num_tokens == 0:
        return {(): Fraction(1)}
    return {
        (token, *tail): probability * factor
        for token, probability in enumerate(target.law_after(prompt))
        if probability
        for tail, factor in law_of_target(target, [*prompt, token], num_tokens - 1).items()
    }


def total_variation(
    one: dict[tuple[int, ...], Fraction], other: dict[tuple[int, ...], Fraction]
) -> Fraction:
    """Half the sum of all differences."""
    keys = one.keys() | other.keys()
    return sum((abs(one.get(k, 0) - other.get(k, 0)) for k in keys), Fraction(0)) / 2
