"""The cascade asks whom it should, and costs no drafter pass where lookup serves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel

from omnidraft_npu.bridge.following import IdentityBridge
from omnidraft_npu.bridge.walk import PlainWalk
from omnidraft_npu.cascade import Cascade
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.lookup import PromptLookup
from omnidraft_npu.speculative import generate


def make_cascade(model):
    drafter = ModelDrafter(model, IdentityBridge(model.vocab_size), PlainWalk(model.vocab_size))
    return Cascade(PromptLookup(), drafter)


def decode(proposer, target, prompt, k=4, num_tokens=60):
    target.rewind(0)
    config = DecodeConfig(max_new_tokens=num_tokens, max_draft_tokens=k)
    rounds = list(generate(proposer, target, prompt, config))
    return [i for r in rounds for i in r.verdict.token_ids], rounds


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), noise=st.sampled_from([0.0, 0.5, 5.0]), k=st.integers(1, 8))
def test_speculative_greedy_is_plain_greedy(seed, noise, k):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(20, 20))
    target = MarkovModel(table, history=2)
    cascade = make_cascade(MarkovModel(table + noise * rng.normal(size=(20, 20)), history=2))
    for length in (9, 1, 4):
        prompt = rng.integers(0, 20, length).tolist()
        plain, _ = decode(None, target, prompt)
        drafted, rounds = decode(cascade, target, prompt, k)
        assert drafted == plain
        fresh = make_cascade(MarkovModel(cascade._fallback._model.table, history=2))
        _, fresh_rounds = decode(fresh, target, prompt, k)
        assert [(r.verdict, r.source) for r in rounds] == [
            (r.verdict, r.source) for r in fresh_rounds
        ]


def test_a_round_that_lookup_serves_costs_no_drafter_pass(rng):
    """The drafter is wrong, the text a loop: lookup must take over and the drafter rest."""
    table = np.eye(6)[[1, 2, 3, 4, 5, 0]]
    model = MarkovModel(np.roll(table, 1, axis=1))
    cascade = make_cascade(model)
    cascade.begin([0])
    passes = model.num_forwards
    _, rounds = decode(cascade, MarkovModel(table), [0])
    sources = [r.source for r in rounds if r.num_proposed]
    num_drafted = sources.count("model")
    assert set(sources[num_drafted:]) == {"lookup"}
    assert num_drafted < 8 < len(sources)
    assert model.num_forwards <= passes + 4 * num_drafted
    assert all(r.draft_model_s == 0 for r in rounds if r.source == "lookup")
    assert all(r.verdict.num_accepted == r.num_proposed for r in rounds[num_drafted:])


def test_the_drafter_catches_up_after_rounds_of_lookup():
    model = MarkovModel(np.random.default_rng(0).normal(size=(8, 8)), history=3)
    cascade = make_cascade(model)
    context = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    cascade.begin(context)
    fed = model.num_fed
    assert cascade.propose(2).source == "lookup"
    cascade.observe([5, 1, 2])
    assert cascade.propose(2).source == "lookup"
    cascade.observe([3, 7, 0])
    assert model.num_fed == fed
    proposal = cascade.propose(2)
    assert proposal.source == "model"
    # Everything decided, and the draft tokens but the last.
    assert model.cache == [*context, 5, 1, 2, 3, 7, 0, proposal.token_ids[0]]


def test_a_lookup_that_fails_is_asked_no_more(rng):
    """A drafter that is always right, and a text that never goes on as it did before."""
    cascade = make_cascade(MarkovModel(rng.normal(size=(40, 40)), history=3))
    prompt = [1, 2, 3, 4, 5] * 4
    cascade.begin(prompt)
    sources = []
    for _ in range(12):
        cascade.observe([1, 2, 3, 4])
        proposal = cascade.propose(4)
        sources.append(proposal.source)
        is_right = proposal.source == "model"
        cascade.observe(proposal.token_ids if is_right else [(proposal.token_ids[0] + 1) % 40])
    num_lookups = sources.count("lookup")
    assert sources == ["lookup"] * num_lookups + ["model"] * (12 - num_lookups)
    assert 2 <= num_lookups <= 5
    cascade.begin(prompt)  # another response: what was learned of this one is forgotten
    cascade.observe([1, 2, 3, 4])
    assert cascade.propose(4).source == "lookup"


def test_interleaved_conversations_do_not_see_each_other(rng):
    """llama.cpp #27852: a second request made the acceptance of the first collapse."""
    table = 2 * rng.normal(size=(15, 15))
    prompts = [rng.integers(0, 15, 12).tolist() for _ in range(2)]
    alone = [
        [
            (r.verdict, r.source)
            for r in decode(make_cascade(MarkovModel(table)), MarkovModel(table), p)[1]
        ]
        for p in prompts
    ]
    config = DecodeConfig(max_new_tokens=60)
    streams = [
        generate(make_cascade(MarkovModel(table)), MarkovModel(table), p, config) for p in prompts
    ]
    together = [[], []]
    for pair in zip(*streams, strict=False):
        for rounds, one in zip(together, pair, strict=True):
            rounds.append((one.verdict, one.source))
    for got, expected in zip(together, alone, strict=True):
        assert got == expected[: len(got)]
        assert len(got) >= 10


@pytest.mark.parametrize("budget", [0, 1])
def test_nothing_is_learned_of_a_round_without_a_proposal(budget):
    cascade = make_cascade(MarkovModel(np.eye(4)))
    cascade.begin([1, 2])
    before = dict(cascade._expected)
    if budget:
        cascade.propose(budget)
    cascade.observe([0])
    assert (cascade._expected == before) == (budget == 0)
    after = dict(cascade._expected)
    cascade.observe([0])
    assert cascade._expected == after
