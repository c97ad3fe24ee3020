"""A trie that grows token by token is the trie that is built of all of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft_npu.bridge.growing import with_token
from omnidraft_npu.bridge.spelling import Spellings
from omnidraft_npu.bridge.trie import SpellingTrie

NUM_TARGETS = 60


def build(runs):
    return SpellingTrie.build(Spellings.from_runs(runs, {7: 3}), NUM_TARGETS)


def fields_of(trie):
    return {f.name: getattr(trie, f.name) for f in dataclasses.fields(trie)}


@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=NUM_TARGETS
    ),
    num_built=st.integers(0, NUM_TARGETS),
)
def test_growing_gives_the_arrays_of_a_build(runs, num_built):
    """Prefixes of earlier runs, runs that others begin with and equal runs are all frequent."""
    spelled = dict(enumerate(runs))
    trie = build({i: run for i, run in spelled.items() if i < num_built})
    for token_id in range(min(num_built, len(runs)), len(runs)):
        before = {name: array.copy() for name, array in fields_of(trie).items()}
        grown = with_token(trie, token_id, runs[token_id])
        for name, array in before.items():
            np.testing.assert_array_equal(getattr(trie, name), array, err_msg=name)
        trie = grown
    for name, array in fields_of(build(spelled)).items():
        np.testing.assert_array_equal(getattr(trie, name), array, err_msg=name)
        assert getattr(trie, name).dtype == np.int32


def test_a_token_that_is_there_or_has_no_pieces_is_refused():
    trie = build({0: [1, 2]})
    with pytest.raises(ValueError, match="token 0"):
        with_token(trie, 0, [1])
    with pytest.raises(ValueError, match="token 1 with 0 pieces"):
        with_token(trie, 1, [])
