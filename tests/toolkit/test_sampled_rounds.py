"""First tokens of sampled rounds over real vocabularies follow the target's law (chi-square)."""

import numpy as np
import pytest
from sampled_rounds import first_tokens, likely_tokens, noisy_drafter
from shared_files import encoder, vocabulary

from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.chi_square import chi_square
from omnidraft_npu.config import SamplingConfig

UNLIKELY = 1e-6
"""About five sigma."""


@pytest.fixture(scope="module")
def trie():
    """Llama 2 drafts for Qwen 3: 17 % of the target's tokens are pieces."""
    spellings = full_spellings(encoder("llama2"), vocabulary("qwen3"))
    return SpellingTrie.build(spellings, vocabulary("qwen3").size)


def sample_rounds(trie, num_rounds, **options):
    rng = np.random.default_rng(1)
    logits = likely_tokens(trie, rng, 200)
    num_pieces = vocabulary("llama2").size
    drafter = noisy_drafter(trie, logits, num_pieces, rng)
    return first_tokens(
        trie, drafter, logits, num_pieces=num_pieces, num_rounds=num_rounds, **options
    )


@pytest.mark.parametrize(
    "num_rounds", [4_000, pytest.param(100_000, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=0.7, top_k=60, top_p=0.9, min_p=0.001),
    ],
    ids=["temperature 1", "all options"],
)
def test_first_tokens_follow_the_target(trie, num_rounds, sampling):
    counts, law, accepted = sample_rounds(trie, num_rounds, sampling=sampling)
    assert chi_square(counts, law).p_value > UNLIKELY
    assert accepted > 0.25


def test_first_tokens_by_the_rule_of_the_paper_do_not(trie):
    sampling = SamplingConfig(temperature=1.0)
    counts, law, _ = sample_rounds(trie, 4_000, sampling=sampling, rule="paper")
    assert chi_square(counts, law).p_value < UNLIKELY
