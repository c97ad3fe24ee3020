"""Answers of before offer what followed the latest longest match, and know their worth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel, first_tokens_against_law

from omnidraft_npu.bridge.following import IdentityBridge
from omnidraft_npu.bridge.walk import PlainWalk
from omnidraft_npu.cascade import Cascade
from omnidraft_npu.config import MAX_ADAPTED_LENGTH, DecodeConfig
from omnidraft_npu.draft_length import DraftLength
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.lookup import PromptLookup
from omnidraft_npu.past_answers import Foretold, PastAnswers
from omnidraft_npu.speculative import generate

SIZE = 30

answers = st.lists(st.lists(st.integers(0, 2), max_size=25), max_size=5)


def naive(texts, context, k):
    """By the definition: every place of every answer, the longest n-gram, then the latest."""
    for n in (6, 4, 2):
        if n > len(context):
            continue
        for text in reversed(texts):
            for at in range(len(text) - 1, n - 1, -1):
                if text[at - n : at] == context[-n:]:
                    return tuple(text[at : at + k])
    return None


@settings(max_examples=300, deadline=None)
@given(texts=answers, context=st.lists(st.integers(0, 2), max_size=9), k=st.integers(1, 8))
def test_a_draft_is_what_a_search_of_every_answer_finds(texts, context, k):
    past = PastAnswers()
    for text in texts:
        past.add(text)
    found = past.after(context, k)
    assert (None if found is None else found.token_ids) == naive(texts, context, k)


def test_answers_are_bounded_and_the_oldest_go():
    past = PastAnswers(max_tokens=200)
    for i in range(100):
        past.add([1000 * i + j for j in range(16)])
        assert len(past) <= 200
        assert past.after([1000 * max(0, i - 3), 1000 * max(0, i - 3) + 1], 1) is not None
        assert past.after([1000 * i, 1000 * i + 1], 3).token_ids == tuple(
            1000 * i + j for j in (2, 3, 4)
        )
    kept = [i for i in range(100) if past.after([1000 * i, 1000 * i + 1], 1) is not None]
    assert kept == list(range(kept[0], 100))
    assert 4 <= len(kept) <= 11
    assert len(past._followers) <= 3 * len(past)


def test_one_answer_that_is_longer_than_the_bound_is_kept_alone():
    past = PastAnswers(max_tokens=20)
    past.add([1, 2, 3, 4])
    past.add(list(range(100, 150)))
    assert past.after([1, 2], 1) is None
    assert past.after([100, 101], 2).token_ids == (102, 103)


def test_trust_rises_where_answers_are_alike_and_falls_where_they_are_not(rng):
    def trust(texts):
        past = PastAnswers()
        for text in texts:
            past.add(text)
        return past.after(texts[-1][:8], 4).acceptance

    alike = [[*range(10, 50), i] for i in range(8)]
    unlike = [[*rng.integers(0, 3, 40).tolist()] for _ in range(8)]
    first = trust(alike[:1])
    assert trust(alike) > 0.8 > first > trust(unlike) + 0.02


def test_what_is_promised_is_a_share_of_the_budget():
    assert Foretold(token_ids=(1, 2), acceptance=0.5).share_of(2) == pytest.approx(0.375)
    assert Foretold(token_ids=(1, 2), acceptance=0.5).share_of(8) == pytest.approx(0.75 / 8)


def drafter_of(table):
    return ModelDrafter(MarkovModel(table), IdentityBridge(SIZE), PlainWalk(SIZE))


def told(target, prompt, num_answers=6, num_tokens=80):
    """A past that has seen the target's own greedy answer, and it."""
    target.rewind(0)
    config = DecodeConfig(max_new_tokens=num_tokens)
    rounds = generate(None, target, prompt, config)
    text = [i for one in rounds for i in one.verdict.token_ids]
    past = PastAnswers()
    for _ in range(num_answers):
        past.add(text)
    return past, text


def line_of(rng):
    """A text that does not repeat itself for a while, whatever came before."""
    order = rng.permutation(SIZE)
    table = np.zeros((SIZE, SIZE))
    table[order, np.roll(order, -1)] = 9.0
    return table, order.tolist()


@pytest.mark.parametrize("is_adapted", [False, True])
def test_an_answer_that_was_given_before_is_drafted_without_the_drafter(rng, is_adapted):
    table, order = line_of(rng)
    target = MarkovModel(table)
    past, text = told(target, order[:1], num_tokens=SIZE - 1)
    control = DraftLength() if is_adapted else None
    cascade = Cascade(PromptLookup(), drafter_of(rng.normal(size=table.shape)), past)
    target.rewind(0)
    length = MAX_ADAPTED_LENGTH if is_adapted else 4
    config = DecodeConfig(max_new_tokens=SIZE - 1, max_draft_tokens=length)
    rounds = list(generate(cascade, target, order[:1], config, control))
    assert [i for one in rounds for i in one.verdict.token_ids] == text
    drafted = [one for one in rounds if one.source == "past" and one.num_proposed]
    assert sum(one.verdict.num_accepted for one in drafted) > 0.6 * SIZE
    assert all(one.draft_model_s == 0 for one in drafted)
    # Four tokens in a row that came before are trusted at once; each round of the drafter,
    # which is wrong, gives one.
    assert sum(one.draft_model_s > 0 for one in rounds) <= 4


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    is_adapted=st.booleans(),
    k=st.integers(1, 8),
    noise=st.floats(0, 3),
)
def test_greedy_text_is_the_targets_whatever_was_answered_before(seed, is_adapted, k, noise):
    rng = np.random.default_rng(seed)
    table = 3 * rng.normal(size=(SIZE, SIZE))
    target = MarkovModel(table, history=2)
    past, _ = told(MarkovModel(table + noise * rng.normal(size=table.shape), history=2), [1])
    past.add(rng.integers(0, SIZE, 200).tolist())
    control = DraftLength() if is_adapted else None
    cascade = Cascade(PromptLookup(), drafter_of(rng.normal(size=table.shape)), past)
    config = DecodeConfig(max_new_tokens=60, max_draft_tokens=k)
    texts = []
    for proposer, controller in ((None, None), (cascade, control)):
        target.rewind(0)
        rounds = generate(proposer, target, [1], config, controller)
        texts.append([i for one in rounds for i in one.verdict.token_ids])
    assert texts[0] == texts[1]


def test_sampling_with_answers_of_before_keeps_the_targets_law(rng):
    """The first two tokens after a prompt that answers foretell rightly, wrongly or never."""
    target = MarkovModel(rng.normal(size=(3, 3)))
    drafter = ModelDrafter(MarkovModel(rng.normal(size=(3, 3))), IdentityBridge(3), PlainWalk(3))
    past = PastAnswers()
    for _ in range(20):
        past.add([0, 2, 1] * 5)  # foretold at every place, so the past is trusted
    cascade = Cascade(PromptLookup(), drafter, past)
    statistic, sources = first_tokens_against_law(cascade, target, [2, 1, 0, 2, 1, 0])
    assert "past" in sources
    assert statistic < 40


def test_a_cascade_without_a_past_and_with_an_empty_one_do_the_same(rng):
    table = 2 * rng.normal(size=(SIZE, SIZE))
    own = table + rng.normal(size=table.shape)
    found = []
    for past in (None, PastAnswers()):
        target = MarkovModel(table)
        cascade = Cascade(PromptLookup(), drafter_of(own), past)
        config = DecodeConfig(max_new_tokens=60)
        rounds = generate(cascade, target, [1, 2, 3], config)
        found.append([(one.verdict, one.source) for one in rounds])
    assert found[0] == found[1]
