"""Drafting leaves the target's law alone: total variation 0, in fractions."""

from fractions import Fraction

import numpy as np
import pytest
from exact_laws import (
    exact_arithmetic,
    exact_law,
    law_of_tokens,
)
from toy_drafting import NUM_TOKENS, StoppedProposer, ToyPair, conversation_distance, distance

from omnidraft_npu import token_law
from omnidraft_npu.token_law import Sampler, TokenLaw, sample

LOSSLESS = ["direct", "cache", "full", "plain", "text", "point", "cascade"]


@pytest.mark.parametrize("mode", LOSSLESS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafted_tokens_have_exactly_the_law_of_the_target(mode, k):
    slow = {"plain": {1: 8, 2: 3, 3: 1}, "text": {1: 12, 2: 6, 3: 2}}
    num_pairs = slow.get(mode, {1: 30, 2: 16, 3: 8})
    num_tokens = 1 if mode == "text" and k > 1 else 2
    for seed in range(num_pairs[k]):
        assert distance(ToyPair(seed), mode, k, num_tokens=num_tokens) == 0, seed


@pytest.mark.parametrize("mode", [mode for mode in LOSSLESS if mode != "point"])
@pytest.mark.parametrize("k", [2, 3])
def test_drafts_that_end_by_what_was_drafted_leave_the_law_alone(mode, k):
    """The rule of an adapted draft length: it sees laws of pieces drawn so far, never the target.

    The random ends must be there, or this is the test above once more.
    """
    num_pairs = {"plain": {2: 4, 3: 2}, "text": {2: 6, 3: 3}}.get(mode, {2: 16, 3: 8})[k]
    stops = set()

    def stopped(proposer):
        wrapped = StoppedProposer(proposer)
        wrapped.stops = stops
        return wrapped

    for seed in range(num_pairs):
        pair = ToyPair(seed)
        num_tokens = 1 if mode == "text" else 2
        assert distance(pair, mode, k, num_tokens=num_tokens, wrap=stopped) == 0, seed
    assert {"cost", "budget"} <= stops


@pytest.mark.parametrize("max_thinned", [1, 2])
@pytest.mark.parametrize("mode", ["full", "plain", "cascade"])
def test_draws_that_spare_the_sums_have_the_same_law(mode, max_thinned):
    for seed in range(8):
        pair = ToyPair(seed)
        assert distance(pair, mode, 1, num_tokens=1, max_thinned=max_thinned) == 0, seed


@pytest.mark.parametrize("max_drawn", [1, 2])
@pytest.mark.parametrize("mode", ["direct", "full"])
def test_pieces_that_lead_nowhere_are_drawn_again_in_the_same_law(mode, max_drawn):
    for seed in range(8):
        assert (
            distance(ToyPair(seed), mode, 3 - max_drawn, num_tokens=1, max_drawn=max_drawn) == 0
        ), seed


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("mode", ["full", "plain"])
def test_what_options_leave_out_of_the_drafts_does_not_change_the_law(mode, options):
    for seed in range(8 if mode == "full" else 3):
        assert distance(ToyPair(seed), mode, 2, num_tokens=1, options=options) == 0, seed


def test_the_law_is_kept_over_several_rounds_of_one_conversation():
    """Counters, caches and rewinding included: one `generate`, not one a round."""
    for seed in range(3):
        assert conversation_distance(ToyPair(seed)) == 0, seed


def test_the_rule_of_the_paper_is_only_near_the_target():
    distances = [float(distance(ToyPair(seed), "paper", 2)) for seed in range(20)]
    assert sum(d > 0.005 for d in distances) > 5
    assert max(distances) < 0.5


def test_the_rule_of_the_paper_on_its_counterexample():
    """Pieces f, l, x; g is spelled f l: it emits f 1/8, g 5/8, x 1/4, not 1/4, 1/2, 1/4."""
    f, x, g = range(3)
    pair = ToyPair(0)
    pair.aliases, pair.runs = {}, {f: [0], x: [2], g: [0, 1]}
    half, quarter, none = Fraction(1, 2), Fraction(1, 4), Fraction(0)
    pair.drafter.history = 1
    pair.drafter.table[:] = [half, none, half, none, none]
    pair.drafter.table[0] = [none, half, half, none, none]  # after f
    pair.target.table[:] = [quarter, quarter, half, *[none] * (NUM_TOKENS - 3)]
    with exact_arithmetic():
        drafted = law_of_tokens(pair.paper, pair.target, [x], 2, 1)
        exact = law_of_tokens(pair.full, pair.target, [x], 2, 1)
    assert exact == {(f,): quarter, (x,): quarter, (g,): half}
    assert drafted == {(f,): Fraction(1, 8), (x,): quarter, (g,): Fraction(5, 8)}


def test_sampling_a_long_law_by_blocks_is_exact(monkeypatch):
    monkeypatch.setattr(token_law, "_BLOCK", 4)
    weights = np.array([Fraction(int(n)) for n in np.random.default_rng(0).integers(0, 3, 31)])
    law = exact_law(lambda generator: sample(weights, generator))
    assert law == {i: w / weights.sum() for i, w in enumerate(weights) if w}


@pytest.mark.parametrize("block", [4, 512])
def test_a_draw_of_another_token_is_exact(monkeypatch, block):
    monkeypatch.setattr(token_law, "_BLOCK", block)
    weights = np.array([Fraction(int(n)) for n in np.random.default_rng(0).integers(0, 3, 31)])
    for excluded in range(31):
        law = exact_law(lambda generator, i=excluded: Sampler(weights).draw_other(i, generator))
        rest = weights.sum() - weights[excluded]
        others = {i: w / rest for i, w in enumerate(weights) if w and i != excluded}
        assert law == others


def test_a_law_of_few_tokens_is_that_of_all_with_the_others_at_0():
    dense = np.array([Fraction(n) for n in (0, 2, 0, 0, 3, 1, 0)])
    ids = np.flatnonzero(dense)
    few, all_ = TokenLaw(dense[ids], ids, len(dense)), TokenLaw(dense)
    assert few.total == all_.total
    assert exact_law(few.draw) == exact_law(all_.draw)
    assert (few.dense == dense).all()
    for i in range(len(dense)):
        assert few.of(np.array([i])) == dense[i]
        assert exact_law(lambda g, i=i: few.draw_other(i, g)) == exact_law(
            lambda g, i=i: all_.draw_other(i, g)
        )
    some = np.array([6, 4, 0, 1])
    assert few.mass(some) == all_.mass(some) == 5
