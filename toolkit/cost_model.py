"""What drafting should gain on a chip: a projection from published speeds, never a measurement.

    speed-up = mean acceptance length / (verify(length) + draft steps * draft step)

with every cost in one-token passes of the target. Mean acceptance length comes from the
acceptance by position that `bench` measured; verify(length) is linear between the published
costs of 1 and of 128 tokens, an assumption that a measurement on the chip should replace.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from .chips.figures import PassFigure, require_figures
from .chips.table import Chip
from .errors import ConfigError

VERIFY_LENGTHS = (8, 16, 24, 32)
"""Lengths of the verify graph that a projection compares."""
PREFILL_LENGTH = 128
"""Tokens of the pass whose cost is published beside that of one token."""

_RUNTIMES = ("geniex_qairt", "genie", "qnn_context_binary")
"""Of the published figures, the runtime with the steadiest ones first."""


@dataclass(frozen=True, kw_only=True)
class ChipSpeed:
    """One-token passes on a chip as a straight line in the size of the model."""

    device: str
    runtime: str
    context_length: int
    """Of the figures, the published one nearest to the one asked for."""
    num_models: int
    smallest_b: float
    """Billions of parameters of the smallest of them; times of smaller ones are a guess."""
    overhead_ms: float
    """What a pass takes whatever the model's size."""
    ms_per_b: float
    """What a billion parameters at 4 bits add."""
    prefill_cost: float
    """Passes of one token that one of 128 costs, the median over the models."""

    def one_token_ms(self, parameters_b: float) -> float:
        """A one-token pass of a model of so many billions of parameters."""
        return self.overhead_ms + self.ms_per_b * parameters_b

    def verify_cost(self, length: int) -> float:
        """A pass over `length` tokens, in one-token passes."""
        return 1 + (self.prefill_cost - 1) * (length - 1) / (PREFILL_LENGTH - 1)


@dataclass(frozen=True, kw_only=True)
class Best:
    """The draft length that pays most, under one assumption about the drafter."""

    draft_tokens: int
    mean_acceptance_length: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class LengthProjection:
    """What a verify graph of one length buys."""

    verify_length: int
    verify_cost: float
    """In one-token passes."""
    best: Best
    """With a draft step on the published line, all its overhead included."""
    best_without_overhead: Best
    """With a draft step that only reads its weights, as a drafter of few layers may."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Every input, and what follows from it."""

    chip: str
    acceptance_by_position: tuple[float, ...]
    acceptance_after: float
    """Assumed for positions that were not measured."""
    target_b: float
    drafter_b: float
    """Billions of parameters."""
    speed: ChipSpeed
    target_step_ms: float
    draft_step_ms: float
    draft_step_without_overhead_ms: float
    lengths: tuple[LengthProjection, ...]

    @property
    def longer_gain(self) -> tuple[LengthProjection, float]:
        """The verify length that pays most, and by which share it beats the shortest one.

        Under the assumption that favours long drafts: a drafter that only reads its weights.
        """
        best = max(self.lengths, key=lambda row: row.best_without_overhead.speedup)
        shortest = self.lengths[0].best_without_overhead.speedup
        return best, best.best_without_overhead.speedup / shortest - 1

    def to_json(self) -> dict[str, Any]:
        """The record as plain dictionaries and lists, labelled for what it is."""
        return {"is_projection": True, **dataclasses.asdict(self)}


def chip_speed(chip: Chip, context_length: int) -> ChipSpeed:
    """The line through the published figures of a chip at the nearest context length.

    Raises:
        ConfigError: nothing is published for the chip; lists those with figures.
    """
    figures = require_figures(chip)
    runtime = min((f.runtime for f in figures), key=_RUNTIMES.index)
    device = min((f.device for f in figures), key=chip.figures.index)
    chosen = [f for f in figures if (f.runtime, f.device) == (runtime, device)]
    nearest = min(
        (f.context_length for f in chosen),
        key=lambda length: (abs(length - context_length), length),
    )
    chosen = [f for f in chosen if f.context_length == nearest]
    overhead_ms, ms_per_b = _line(chosen)
    return ChipSpeed(
        device=chosen[0].device,
        runtime=chosen[0].runtime,
        context_length=nearest,
        num_models=len(chosen),
        smallest_b=min(f.parameters_b for f in chosen),
        overhead_ms=overhead_ms,
        ms_per_b=ms_per_b,
        prefill_cost=statistics.median(f.ttft_min_ms / f.one_token_ms for f in chosen),
    )


def project(
    chip: Chip,
    *,
    acceptance_by_position: Sequence[float],
    acceptance_after: float,
    target_b: float,
    drafter_b: float,
    context_length: int,
    verify_lengths: Sequence[int] = VERIFY_LENGTHS,
) -> Projection:
    """The best draft length on a chip and its speed-up, for each length of the verify graph.

    Args:
        chip: One with published figures.
        acceptance_by_position: Conditional acceptance of the first, second, ... draft token.
        acceptance_after: The same for every later one.
        target_b, drafter_b: Sizes in billions of parameters, at 4 bits.
        context_length: Of the target; the nearest published one is taken.
        verify_lengths: Lengths to compare; each allows drafts of one token less.

    Raises:
        ConfigError: a size that cannot be, no acceptance, or nothing published for the chip.
    """
    for name, size in (("target", target_b), ("drafter", drafter_b)):
        if not size > 0:
            raise ConfigError(f"the {name}'s size is {size} billion parameters, must be above 0")
    if not acceptance_by_position:
        raise ConfigError("nothing was drafted, so there is no acceptance to project from")
    speed = chip_speed(chip, context_length)
    target_ms, draft_ms = speed.one_token_ms(target_b), speed.one_token_ms(drafter_b)
    bare_ms = speed.ms_per_b * drafter_b
    most = max(verify_lengths) - 1
    later = [acceptance_after] * max(0, most - len(acceptance_by_position))
    kept = accumulate([*acceptance_by_position, *later][:most], mul)
    tokens = list(accumulate([1.0, *kept]))
    lengths = []
    for length in verify_lengths:
        cost = speed.verify_cost(length)
        lengths.append(
            LengthProjection(
                verify_length=length,
                verify_cost=cost,
                best=_best(tokens[:length], cost, draft_ms / target_ms),
                best_without_overhead=_best(tokens[:length], cost, bare_ms / target_ms),
            )
        )
    return Projection(
        chip=chip.key,
        acceptance_by_position=tuple(acceptance_by_position),
        acceptance_after=acceptance_after,
        target_b=target_b,
        drafter_b=drafter_b,
        speed=speed,
        target_step_ms=target_ms,
        draft_step_ms=draft_ms,
        draft_step_without_overhead_ms=bare_ms,
        lengths=tuple(lengths),
    )


def _best(tokens: Sequence[float], verify_cost: float, draft_cost: float) -> Best:
    """The best k of one verify graph; `tokens` has the mean acceptance length of every k."""
    speedups = [tokens[k] / (verify_cost + k * draft_cost) for k in range(1, len(tokens))]
    k = 1 + max(range(len(speedups)), key=speedups.__getitem__)
    return Best(draft_tokens=k, mean_acceptance_length=tokens[k], speedup=speedups[k - 1])


def _line(figures: Sequence[PassFigure]) -> tuple[float, float]:
    """Overhead and slope of the least-squares line; through zero where one cannot be told."""
    sizes = [f.parameters_b for f in figures]
    times = [f.one_token_ms for f in figures]
    if len(set(sizes)) > 1:
        slope, overhead = statistics.linear_regression(sizes, times)
        if overhead >= 0 and slope > 0:
            return overhead, slope
    return 0.0, sum(map(mul, sizes, times)) / sum(map(mul, sizes, sizes))
