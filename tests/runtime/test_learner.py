"""Lessons: what they teach, and what comes of it."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from learning_bundle import RANK
from lessons_given import FAST, PROMPTS, answer, answer_all, opened, spoil, teach

from omnidraft_npu.files import sha256_of
from omnidraft_npu.runtime.adapter_store import BASE
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.session import Session


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def test_lessons_make_the_drafter_better_and_leave_text_and_files_alone(bundle):
    pair = opened(bundle)
    before = {p: sha256_of(p) for p in bundle.rglob("*") if p.is_file()}
    session = Session(pair)
    lessons = []
    with open_learner(pair, FAST, threads=1) as learner:
        answers = answer_all(session, learner)
        assert learner.is_due
        for _ in range(4):
            answer_all(session, learner)
            lessons.append(learner.step())
        assert not learner.is_due
        assert learner.step() is None
    kept = [lesson for lesson in lessons if lesson.outcome == "kept"]
    assert kept
    assert all(lesson.after.mean > lesson.before.mean for lesson in kept)
    assert kept[-1].after.greedy > kept[0].before.greedy + 0.1
    assert pair.adapter.adapter.version == kept[-1].version
    again = opened(bundle)
    assert again.adapter.adapter.version == kept[-1].version
    fresh = Session(again)
    first, later = Session(opened_base(bundle)), [answer(fresh, prompt) for prompt in PROMPTS]
    base = [answer(first, prompt) for prompt in PROMPTS]
    assert [ids for ids, _ in later] == [ids for ids, _ in base] == answers
    assert sum(s.accepted for _, s in later) > sum(s.accepted for _, s in base)
    assert {p: sha256_of(p) for p in before} == before


def opened_base(bundle):
    """The pair with the drafter as it was exported."""
    pair = opened(bundle)
    pair.adapter.adapter = type(pair.adapter)().adapter
    return pair


def test_a_new_version_is_used_from_the_next_request_on(bundle):
    pair = opened(bundle)
    session = Session(pair)
    with open_learner(pair, FAST, threads=1) as learner:
        for _ in range(3):
            answer_all(session, learner)
            learner.step()
        _, there = answer(session, PROMPTS[0])
    _, anew = answer(Session(opened(bundle)), PROMPTS[0])
    assert pair.adapter.adapter.version != BASE
    assert (there.accepted, there.proposed) == (anew.accepted, anew.proposed)
    assert session.draft_length.head is pair.adapter.adapter.head is not None


def test_the_same_answers_teach_the_same(learning_original, tmp_path):
    found = [teach(shutil.copytree(learning_original, tmp_path / str(i))) for i in range(2)]
    (first, one), (second, other) = found
    assert [str(a.after) for a in first] == [str(b.after) for b in second]
    assert one.version == other.version != BASE
    for name, tensor in one.lora.items():
        np.testing.assert_array_equal(tensor, other.lora[name])


def test_learning_in_two_processes_is_learning_in_one(learning_original, tmp_path):
    """What is under training is kept, the optimiser's moments included."""
    _, together = teach(shutil.copytree(learning_original, tmp_path / "one"))
    apart = shutil.copytree(learning_original, tmp_path / "two")
    teach(apart, rounds=1)
    _, adapter = teach(apart, rounds=1)
    for name, tensor in together.lora.items():
        np.testing.assert_array_equal(tensor, adapter.lora[name])


def test_a_lesson_begins_with_the_latest_where_nothing_is_known_of_many_answers(bundle):
    """One lesson was over all that were ever kept: hours, and none of it stayed if broken off."""
    pair = opened(bundle)
    with open_learner(pair, replace(FAST, max_new=4), threads=1) as learner:
        answer_all(Session(pair), learner)
        assert learner.num_new == 4 < len(PROMPTS) // FAST.held_out_every
        lesson = learner.step()
        assert lesson.num_examples == 4
        assert not learner.is_due


def test_what_drafts_worse_is_rolled_back(bundle, monkeypatch):
    """Uphill instead of downhill."""
    with monkeypatch.context() as context:
        spoil(context, lambda _, gradients: (1.0, {n: -g for n, g in gradients.items()}))
        (lesson, *_), adapter = teach(bundle, rounds=1)
    assert lesson.outcome == "rolled back"
    assert lesson.after.mean < lesson.before.mean
    assert adapter.version == BASE
    (lesson, *_), adapter = teach(bundle, rounds=1)
    assert lesson.outcome == "kept"
    assert adapter.version == lesson.version


def test_a_version_that_drafts_worse_than_none_is_withdrawn(bundle, monkeypatch):
    """As one may that learned from another kind of answers: here what it learned is turned."""
    _, learned = teach(bundle)
    turned = {n: -tensor if n.endswith(".B") else tensor for n, tensor in learned.lora.items()}
    store = opened(bundle).adapter.store
    store.use(store.add(turned, parent=BASE).version)
    spoil(monkeypatch, lambda loss, gradients: (loss, {n: 0 * g for n, g in gradients.items()}))
    (lesson,), adapter = teach(bundle, rounds=1)
    assert lesson.outcome == "withdrawn"
    assert lesson.after == lesson.before
    assert lesson.before.mean < lesson.base.mean
    assert lesson.version == adapter.version == store.current == BASE
    assert str(lesson).endswith("; the drafter is used without an adapter again")
    assert f"(without an adapter {lesson.base.mean:.3f})" in str(lesson)
    assert store.records()[-1].version == learned.version + 1


@pytest.mark.parametrize("loss", ["near", "trie", "reverse", "paper"])
def test_the_other_losses_teach_too(bundle, loss):
    lessons, _ = teach(bundle, replace(FAST, loss=loss), rounds=2)
    assert lessons[1].loss < lessons[0].loss


def test_the_rank_is_that_of_the_bundle(bundle):
    pair = opened(bundle)
    assert pair.adapter.store.key.rank == RANK
