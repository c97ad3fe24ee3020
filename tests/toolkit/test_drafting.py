"""Drafting through the bridge keeps the target's output and follows its context."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from markov_model import MarkovModel
from omnidraft_npu.bridge import ByteBridge
from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.drafting import ModelDrafter
from omnidraft_npu.speculative import generate
from omnidraft_npu.spelling import direct_spellings, full_spellings
from omnidraft_npu.trie import SpellingTrie
from omnidraft_npu.vocabulary import END_ROLES
from omnidraft_npu.walk import TrieWalk
from toy_vocabularies import toy_encoder


def make_drafter(model, encoder, target, spellings=None):
    spellings = spellings or full_spellings(encoder, target)
    return ModelDrafter(
        model,
        ByteBridge(encoder, target),
        TrieWalk(SpellingTrie.build(spellings, target.size), model.vocab_size),
        end_token_ids=frozenset(target.special_ids(*END_ROLES)),
    )


def decode(proposer, model, prompt, **options):
    model.rewind(0)
    config = DecodeConfig(max_new_tokens=40, stop_token_ids=frozenset({2}), **options)
    rounds = list(generate(proposer, model, prompt, config))
    return [i for r in rounds for i in r.verdict.token_ids], rounds


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    k=st.integers(1, 8),
    has_bos=st.booleans(),
    is_direct=st.booleans(),
    context_length=st.sampled_from([2, 3, 9, 30, 4096]),
)
def test_speculative_greedy_is_plain_greedy_for_any_pair_of_vocabularies(
    seed, sizes, k, has_bos, is_direct, context_length
):
    rng = np.random.default_rng(seed)
    drafter = toy_encoder(rng, sizes[0], num_padding=2, has_bos=has_bos)
    target = toy_encoder(rng, sizes[1], num_padding=3).vocabulary
    drafter_model = MarkovModel(
        rng.normal(size=(drafter.vocabulary.size,) * 2), context_length=context_length, history=3
    )
    target_model = MarkovModel(rng.normal(size=(target.size,) * 2), history=2)
    spellings = direct_spellings(drafter.vocabulary, target) if is_direct else None
    proposer = make_drafter(drafter_model, drafter, target, spellings)
    for length in (9, 1, 4):  # a shorter prompt after a longer one sees nothing of it
        prompt = [1, *rng.integers(3, target.size, length - 1).tolist()]
        plain, _ = decode(None, target_model, prompt)
        drafted, rounds = decode(proposer, target_model, prompt, max_draft_tokens=k)
        assert drafted == plain
        fresh = make_drafter(
            MarkovModel(drafter_model.table, context_length=context_length, history=3),
            drafter,
            target,
            spellings,
        )
        _, fresh_rounds = decode(fresh, target_model, prompt, max_draft_tokens=k)
        assert [r.verdict for r in rounds] == [r.verdict for r in fresh_rounds]
