"""Adapted draft lengths: near the best fixed one whatever things cost, and off where none pays."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel
from toy_vocabularies import toy_encoder

from omnidraft_npu import speculative
from omnidraft_npu.acceptance import Calibration, PlaceAcceptance, confidence
from omnidraft_npu.bridge.following import ByteBridge, IdentityBridge
from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.text_walk import TextWalk
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.walk import PlainWalk, TrieWalk
from omnidraft_npu.cascade import Cascade
from omnidraft_npu.config import MAX_ADAPTED_LENGTH, DecodeConfig, SamplingConfig
from omnidraft_npu.draft_length import DraftLength
from omnidraft_npu.draft_times import DraftTimes, RunningMedian
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.lookup import PromptLookup
from omnidraft_npu.proposal import Proposal
from omnidraft_npu.speculative import generate
from omnidraft_npu.verification import Verdict

SIZE = 40


class Clock:
    """Stands still but for the passes of models."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedModel(MarkovModel):
    """A pass takes time by its number of tokens."""

    def __init__(self, table, clock, seconds, **options):
        super().__init__(table, **options)
        self.clock, self.seconds = clock, seconds

    def score(self, token_ids):
        self.clock.now += self.seconds(len(token_ids))
        return super().score(token_ids)


class World:
    """A target of `target_s(n)` seconds for n tokens and a drafter of `draft_s` for a piece.

    The drafter is unsure, and mostly wrong, after some tokens only.
    """

    def __init__(self, monkeypatch, *, draft_s, target_s, share_wrong=0.3):
        self.clock = Clock()
        monkeypatch.setattr(speculative, "time", SimpleNamespace(perf_counter=self.clock))
        rng = np.random.default_rng(0)
        table = 12 * rng.random((SIZE, SIZE))
        self.table = table.copy()
        for row in rng.permutation(SIZE)[: int(share_wrong * SIZE)]:
            self.table[row] = 2 * rng.random(SIZE)
        self.target = TimedModel(table, self.clock, target_s, history=3)
        self.drafter = TimedModel(self.table, self.clock, lambda n: draft_s, history=3)
        self.control = DraftLength(clock=self.clock)

    def proposer(self):
        return ModelDrafter(self.drafter, IdentityBridge(SIZE), PlainWalk(SIZE))

    def decode(self, k="auto", *, num_tokens=600, prompt=(1, 2, 3), temperature=0.6):
        """Rounds of a response, and its tokens per second."""
        self.target.rewind(0)
        config = DecodeConfig(
            max_new_tokens=num_tokens,
            max_draft_tokens=MAX_ADAPTED_LENGTH if k == "auto" else max(1, k),
            sampling=SamplingConfig(temperature=temperature, seed=0),
        )
        proposer = self.proposer() if k else None
        control = self.control if k == "auto" else None
        start = self.clock.now
        rounds = list(generate(proposer, self.target, list(prompt), config, control))
        return rounds, num_tokens / (self.clock.now - start)


def line(first, slope):
    return lambda n: first + slope * (n - 1)


def steps(*costs):
    """Of passes over at most so many tokens."""
    return lambda n: next(cost for limit, cost in costs if n <= limit)


@pytest.mark.parametrize("share_wrong", [0.1, 0.4, 0.8])
@pytest.mark.parametrize(
    ("draft_s", "target_s"),
    [
        (0.1, line(1.0, 0.0)),
        (0.1, line(1.0, 0.1)),
        (0.02, line(1.0, 0.002)),
        (0.3, line(1.0, 0.3)),
        (0.1, steps((1, 1.0), (8, 1.1), (64, 2.0))),
        (0.05, steps((1, 1.0), (2, 1.7), (4, 1.75), (64, 3.5))),
        (1.0, line(1.0, 0.0)),
    ],
)
def test_tokens_per_second_are_near_those_of_the_best_fixed_length(
    monkeypatch, draft_s, target_s, share_wrong
):
    world = World(monkeypatch, draft_s=draft_s, target_s=target_s, share_wrong=share_wrong)
    rates = {k: world.decode(k)[1] for k in (0, 1, 2, 3, 4, 6, 8, 12)}
    world.decode()  # times and acceptance are learned in a response before
    _, adapted = world.decode()
    assert adapted > 0.93 * max(rates.values()), (adapted, rates)


def test_drafting_that_cannot_pay_is_off_and_tried_again_ever_more_rarely(monkeypatch):
    world = World(monkeypatch, draft_s=1.0, target_s=line(1.0, 0.0), share_wrong=0.9)
    rounds, rate = world.decode(num_tokens=1500)
    tried = [i for i, one in enumerate(rounds) if one.stop not in ("off", "trial", None)]
    pauses = np.diff(tried)
    long = pauses[pauses > 1]
    assert rate > 0.9
    assert sorted(set(long.tolist()))[-5:] == [17, 33, 65, 129, 257]
    assert {one.stop for one in rounds} >= {"off", "trial"}
    assert all(one.draft_model_s == 0 for one in rounds if one.stop == "off")


def test_drafting_goes_on_again_when_the_drafter_has_become_better(monkeypatch):
    world = World(monkeypatch, draft_s=0.3, target_s=line(1.0, 0.0), share_wrong=1.0)
    rounds, _ = world.decode(num_tokens=300)
    assert np.mean([one.stop == "off" for one in rounds[-50:]]) > 0.8
    world.drafter.table[:] = world.target.table
    rounds, rate = world.decode(num_tokens=900)
    assert np.mean([one.stop == "off" for one in rounds[-50:]]) < 0.1
    assert rate > 1.5


def test_a_round_ends_where_the_drafter_is_unsure(monkeypatch):
    """With costs that let sure drafts go on: the same rounds' lengths differ."""
    world = World(monkeypatch, draft_s=0.1, target_s=line(1.0, 0.1), share_wrong=0.3)
    world.decode()
    rounds, _ = world.decode()
    lengths = [one.num_proposed for one in rounds[:-1]]
    assert min(lengths) <= 1
    assert max(lengths) >= 5
    shares = [one.verdict.num_accepted / one.num_proposed for one in rounds if one.num_proposed]
    assert np.mean(shares) > 0.7


def test_times_are_learned_in_the_first_rounds(monkeypatch):
    world = World(monkeypatch, draft_s=0.1, target_s=line(1.0, 0.1))
    rounds, _ = world.decode(num_tokens=40)
    assert [one.stop for one in rounds[:4]].count("trial") == 2
    assert rounds[0].num_proposed > 0
    more, _ = world.decode(num_tokens=40)
    assert all(one.stop != "trial" for one in more)


def test_the_same_times_and_texts_give_the_same_decisions(monkeypatch):
    found = []
    for _ in range(2):
        world = World(monkeypatch, draft_s=0.1, target_s=line(1.0, 0.1))
        found.append([(one.verdict, one.stop) for one in world.decode()[0]])
    assert found[0] == found[1]


def test_lookup_drafts_longer_where_it_serves_and_costs_no_drafter_pass(monkeypatch):
    world = World(monkeypatch, draft_s=0.4, target_s=line(1.0, 0.02))
    loop = np.eye(SIZE)[(np.arange(SIZE) + 1) % SIZE]  # a text that repeats itself
    world.target.table, world.target.history = 20 * loop, 1
    model = world.proposer()
    world.proposer = lambda: Cascade(PromptLookup(), model)
    rounds, _ = world.decode(num_tokens=600)
    late = rounds[-10:-1]
    assert {one.source for one in late} == {"lookup"}
    assert all(one.num_proposed > 12 and one.draft_model_s == 0 for one in late)


def test_answers_of_before_are_drafted_from_where_they_are_likelier_than_the_drafter(monkeypatch):
    """Though they cost nothing: how far they are to be trusted was found in other answers."""
    world = World(monkeypatch, draft_s=0.5, target_s=line(1.0, 0.0))
    world.control.begin_round(8)
    assert [world.control.prefers_past(p, 0) for p in (0.3, 0.9)] == [False, True]
    world.decode()
    world.control.begin_round(8)
    found = [world.control.prefers_past(p, 0) for p in (0.1, 0.45, 0.95)]
    assert found == [False, False, True]
    assert not world.control.prefers_past(0.7, 4)
    assert world.control.past_length(0.95) == (8, "budget")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(["full", "text", "cascade", "plain"]),
    noise=st.sampled_from([0.0, 0.5, 5.0]),
    draft_ms=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_greedy_text_is_the_targets_whatever_the_clock_says(seed, mode, noise, draft_ms):
    rng = np.random.default_rng(seed)
    drafter = toy_encoder(rng, 20)
    target = drafter if mode == "plain" else toy_encoder(rng, 20)
    size = target.vocabulary.size
    table = rng.normal(size=(size, size))
    target_model = MarkovModel(table, history=2)
    rows = drafter.vocabulary.size
    own = table + noise * rng.normal(size=table.shape) if rows == size else None
    drafter_model = MarkovModel(rng.normal(size=(rows, rows)) if own is None else own, history=2)
    ticks = rng.random(100_000).cumsum() * draft_ms / 1000
    proposer = proposer_of(mode, drafter_model, drafter, target)
    control = DraftLength(clock=iter(ticks.tolist()).__next__)
    for length in (9, 1, 4):
        prompt = [1, *rng.integers(3, size, length - 1).tolist()]
        config = DecodeConfig(max_new_tokens=60, max_draft_tokens=MAX_ADAPTED_LENGTH)
        target_model.rewind(0)
        plain = [r.verdict.token_ids for r in generate(None, target_model, prompt, config)]
        target_model.rewind(0)
        drafted = [
            r.verdict.token_ids for r in generate(proposer, target_model, prompt, config, control)
        ]
        assert sum(drafted, ()) == sum(plain, ())


def proposer_of(mode, model, drafter, target):
    if mode == "plain":
        return ModelDrafter(model, IdentityBridge(model.vocab_size), PlainWalk(model.vocab_size))
    spellings = full_spellings(drafter, target.vocabulary)
    walk = TrieWalk(SpellingTrie.build(spellings, target.vocabulary.size), model.vocab_size)
    text = TextWalk(drafter.vocabulary, target) if mode == "text" else None
    made = ModelDrafter(model, ByteBridge(drafter, target.vocabulary), text or walk)
    return Cascade(PromptLookup(), made) if mode == "cascade" else made


def test_a_median_leaves_out_what_ran_first_and_what_is_long_ago():
    median = RunningMedian()
    assert median.value == 0
    for seconds in (100.0, 1.0, 3.0, 2.0):
        median.add(seconds)
    assert median.value == 2.0
    for _ in range(9):
        median.add(7.0)
    assert median.value == 7.0
    assert median.num == 13


def test_the_rest_of_a_round_is_interpolated_and_goes_on_as_it_rose():
    times = DraftTimes()
    for k, seconds in ((0, 1.0), (0, 1.0), (4, 3.0), (4, 3.0), (2, 50.0)):
        times.observe_rest(k, seconds)  # of two drafts there is one measurement: not trusted
    np.testing.assert_allclose(times.rest(np.array([0, 1, 2, 4, 6.0])), [1, 1.5, 2, 3, 4])
    times.observe_rest(2, 1.0)
    np.testing.assert_allclose(times.rest(np.array([1, 2, 3.0])), [1, 1, 2])
    assert (times.num_plain, times.num_drafted) == (2, 4)
    assert times.rest(np.array([16, 16.5])).tolist() == [9, np.inf]  # tried step by step


def test_times_of_pieces_add_up():
    times = DraftTimes()
    times.observe_drafting([], 5.0)
    times.observe_drafting([1.0, 1.0], 2.0)
    times.observe_drafting([1.5, 2.0, 1.5], None)
    np.testing.assert_allclose(times.drafting(3), [0, 2.0, 3.5, 5.0])


def test_acceptance_by_place_follows_what_is_seen_and_shares_it():
    places = PlaceAcceptance(0.6)
    np.testing.assert_allclose(places.expected(3), 0.6)
    for _ in range(200):
        places.observe(1, 2)  # the first always, the second never
    first, second, third = places.expected(3)
    assert first > 0.9
    assert second < 0.1
    assert 0.3 < third < 0.7


def test_what_was_left_out_counts_as_it_was_expected():
    places = PlaceAcceptance(0.6)
    for _ in range(200):
        places.observe(1, 1, 0.25)
    first, second = places.expected(2)
    assert first > 0.9
    assert second == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(("bias", "weight"), [(0.0, 1.0), (1.0, 1.0), (-1.0, 0.5), (2.0, 1.5)])
def test_guesses_are_calibrated_by_what_is_found(bias, weight, rng):
    calibration = Calibration()
    assert calibration.expected([0.3]) == pytest.approx(0.3)

    def truth(guess):
        return 1 / (1 + np.exp(-bias - weight * np.log(guess / (1 - guess))))

    for guess in rng.uniform(0.05, 0.95, 3000):
        calibration.observe([guess], rng.random() < truth(guess))
    for guess in (0.2, 0.5, 0.8):
        assert calibration.expected([guess]) == pytest.approx(truth(guess), abs=0.08)
    for guess in rng.uniform(0.05, 0.95, 600):
        calibration.observe([guess], False)  # it follows a change
    assert calibration.expected([0.5]) < 0.1


def test_the_guess_that_knows_more_gets_the_weight(rng):
    calibration = Calibration(2)
    for _ in range(3000):
        idle, right = rng.uniform(0.05, 0.95, 2)
        calibration.observe([idle, right], rng.random() < right)
    for idle in (0.1, 0.9):
        assert calibration.expected([idle, 0.8]) == pytest.approx(0.8, abs=0.1)


def test_a_head_that_knows_more_than_the_drafters_confidence_decides(rng):
    head = SimpleNamespace(probabilities=lambda hidden: hidden[0])
    control = DraftLength(head=head, clock=Clock())
    logits = np.zeros(2, np.float32)  # the drafter is never sure

    def expected(said):
        control.begin_round(4)
        control.before_pass()
        assert control.before_draw(logits, np.array([said])) is None
        return control._probs[-1]

    assert expected(0.9) == pytest.approx(0.5)
    for said in rng.uniform(0.02, 0.98, 600):
        expected(said)
        is_right = rng.random() < said
        verdict = Verdict(token_ids=(1,) * (1 + is_right), num_accepted=int(is_right), num_tested=1)
        control.observe(Proposal(token_ids=(1,)), verdict, draft_s=0.0, rest_s=0.0)
    assert expected(0.9) > 0.75
    assert expected(0.1) < 0.25


def test_confidence_is_the_likeliest_pieces_probability(rng):
    logits = rng.normal(size=50).astype(np.float32)
    law = np.exp(logits) / np.exp(logits).sum()
    assert confidence(logits) == pytest.approx(law.max(), rel=1e-5)
