"""What is kept of the target's laws as a response comes."""

import numpy as np
import pytest

from omnidraft_npu.runtime.learner_recorder import LawRecorder, top_law


@pytest.mark.parametrize("vocab", [5, 255, 256, 1000, 5000])
@pytest.mark.parametrize("num_top", [1, 7, 48])
def test_the_likeliest_tokens_are_found_without_sorting_all(rng, vocab, num_top):
    logits = np.round(rng.normal(size=vocab) * 4, 1).astype(np.float32)
    ids, probs = top_law(logits, num_top)
    expected = np.argsort(-logits, kind="stable")[:num_top]
    law = np.exp(logits.astype(np.float64))
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(probs, (law / law.sum())[expected], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_answer_with_logits_that_are_no_numbers_is_not_learned_from(rng, bad):
    recorder = LawRecorder([1, 2], num_top=4)
    logits = rng.normal(size=(3, 600)).astype(np.float32)
    recorder.add([5, 6], logits)
    assert recorder.answer().laws.top_ids.shape == (2, 4)
    logits[0, 77] = bad
    recorder.add([7], logits)
    assert recorder.answer() is None
