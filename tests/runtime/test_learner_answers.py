"""What is recorded of answers, and which become examples."""

import numpy as np
import pytest
from lessons_given import FAST, PROMPTS, answer, answer_all, examples_of, opened

from omnidraft_npu.config import DecodeConfig
from omnidraft_npu.runtime.answer_keeper import answer_keeper
from omnidraft_npu.runtime.learner_judge import Acceptance, Judge
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.session import Session


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_k": 3, "seed": 4}])
def test_what_is_recorded_is_the_law_that_the_target_itself_gives(bundle, sampling):
    """Whatever was drafted, and whatever the sampling options cut off."""
    pair = opened(bundle)
    session, kept = Session(pair), []

    class Observer:
        observe = staticmethod(kept.append)

    session.observer = Observer()
    token_ids, _ = answer(session, PROMPTS[0], **sampling)
    (one,) = kept
    np.testing.assert_array_equal(one.laws.token_ids, token_ids)
    plain = pair.target.graph.begin()
    ids = [*one.prompt_ids, *token_ids]
    plain.prefill(ids[: len(one.prompt_ids) - 1])
    for i, (top, probs) in enumerate(zip(one.laws.top_ids, one.laws.probs, strict=True)):
        logits = plain.score([ids[len(one.prompt_ids) - 1 + i]])[0].astype(np.float64)
        law = np.exp(logits - logits.max())
        law /= law.sum()
        np.testing.assert_allclose(probs, np.sort(law)[::-1][: len(top)], atol=1e-5)
        np.testing.assert_allclose(law[top], probs, atol=1e-5)


@pytest.mark.parametrize("target", ["target", "same"])
def test_answers_become_examples_in_the_drafters_pieces(bundle, target):
    pair = opened(bundle, target)
    session = Session(pair)
    with open_learner(pair, FAST, threads=1) as learner:
        answers = answer_all(session, learner)
    found = examples_of(bundle, target)
    assert len(found) == len(PROMPTS)
    pieces, tokens = pair.drafter.vocabulary, pair.target.vocabulary
    for example, token_ids in zip(found, answers, strict=True):
        said = b"".join(pieces.token_bytes(i) for i in example.pieces[-example.num_response :])
        assert said == b"".join(tokens.token_bytes(i) for i in token_ids)
        assert example.is_direct.all() or target != "same"


def test_short_answers_are_not_kept(bundle):
    pair = opened(bundle)
    session = Session(pair)
    session.observer = answer_keeper(pair, FAST)
    list(session.generate(session.encode("a", raw=True), DecodeConfig(max_new_tokens=7)))
    assert not examples_of(bundle)


def test_the_judge_counts_what_would_be_drafted(bundle):
    pair = opened(bundle, "same")
    session = Session(pair)
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(session, learner)
    found = examples_of(bundle, "same")
    perfect = Acceptance.of(list(Judge(pair.target.graph).outcomes({}, found)))
    assert perfect.greedy == 1
    named = np.concatenate([example.laws.probs.sum(axis=1) for example in found])
    assert perfect.sampled == pytest.approx(named.mean(), abs=1e-3)
    drafter = Acceptance.of(list(Judge(pair.drafter.graph).outcomes({}, found)))
    assert drafter.greedy < 1
    assert drafter.sampled < perfect.sampled
    assert Acceptance.of([]) is None
