"""Prompt lookup offers what followed the latest longest match, whatever was followed before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel, first_tokens_against_law

from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.lookup import PromptLookup
from omnidraft_npu.proposal import Proposal
from omnidraft_npu.speculative import generate

tokens = st.lists(st.integers(0, 3), max_size=40)


def naive(context, smallest, largest, k):
    """By the definition: every place of every length, longest first, then most recent."""
    for n in range(min(largest, len(context)), smallest - 1, -1):
        for at in range(len(context) - 1, n - 1, -1):
            if context[at - n : at] == context[len(context) - n :]:
                draft = list(context)
                for i in range(k):
                    draft.append(draft[at + i])
                return tuple(draft[len(context) :])
    return ()


@settings(max_examples=300, deadline=None)
@given(
    contexts=st.lists(st.tuples(tokens, st.lists(tokens, max_size=3)), min_size=1, max_size=4),
    smallest=st.integers(1, 3),
    more=st.integers(0, 3),
    k=st.integers(1, 8),
)
def test_a_proposal_is_what_a_search_of_the_whole_context_finds(contexts, smallest, more, k):
    """Several contexts after one another, each extended: nothing of an earlier one is left."""
    lookup = PromptLookup(min_ngram=smallest, max_ngram=smallest + more)
    for context, extensions in contexts:
        context = list(context)
        lookup.begin(context)
        for extension in [[], *extensions]:
            lookup.observe(extension)
            context += extension
            assert lookup.propose(k).token_ids == naive(context, smallest, smallest + more, k)


@settings(max_examples=100, deadline=None)
@given(shared=tokens, old=tokens, new=tokens)
def test_an_index_that_is_reused_equals_a_fresh_one(shared, old, new):
    used, fresh = PromptLookup(), PromptLookup()
    used.begin(shared + old)
    used.begin(shared + new)
    fresh.begin(shared + new)
    assert vars(used) == vars(fresh)


def test_only_what_is_new_of_a_continued_context_is_indexed(monkeypatch):
    lookup = PromptLookup()
    context = list(range(500))
    lookup.begin(context)
    monkeypatch.setattr(lookup, "_take_back", None)
    observed = []
    monkeypatch.setattr(lookup, "observe", observed.extend)
    lookup.begin([*context, 7, 8])
    assert observed == [7, 8]


def test_a_proposal_is_a_point_mass_of_its_own_source():
    lookup = PromptLookup()
    lookup.begin([1, 2, 3, 9, 1, 2])
    assert lookup.propose(2) == Proposal(token_ids=(3, 9), source="lookup")
    assert lookup.propose(0) == Proposal.EMPTY


def test_a_context_without_a_match_gives_no_draft():
    lookup = PromptLookup()
    for context in ([], [1], [1, 2, 3]):
        lookup.begin(context)
        assert lookup.propose(4) == Proposal.EMPTY


def test_sizes_that_cannot_be_are_refused():
    for smallest, largest in ((0, 3), (4, 3)):
        with pytest.raises(ValueError, match=f"{smallest} to {largest}"):
            PromptLookup(min_ngram=smallest, max_ngram=largest)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token_of_a_greedy_text_and_some_are_accepted(rng, k, temperature):
    target = MarkovModel(4 * rng.normal(size=(12, 12)))
    accepted = 0
    config = DecodeConfig(
        max_new_tokens=60,
        max_draft_tokens=k,
        sampling=SamplingConfig(temperature=temperature, seed=3),
    )
    lookup = PromptLookup()
    for length in (9, 1, 4):
        prompt = rng.integers(0, 12, length).tolist()
        texts = []
        for proposer in (None, lookup):
            target.rewind(0)
            rounds = list(generate(proposer, target, prompt, config))
            texts.append([i for one in rounds for i in one.verdict.token_ids])
            accepted += sum(one.verdict.num_accepted for one in rounds)
            assert {one.source for one in rounds if one.num_proposed} <= {"lookup"}
        assert len(texts[0]) == len(texts[1]) == 60
        assert temperature > 0 or texts[0] == texts[1]
    assert accepted > 0


def test_sampling_with_lookup_keeps_the_targets_law(rng):
    """The first two tokens after a prompt whose match is right, wrong or impossible."""
    target = MarkovModel(rng.normal(size=(3, 3)))
    statistic, _ = first_tokens_against_law(PromptLookup(), target, [0, 1, 2, 0])
    assert statistic < 40
