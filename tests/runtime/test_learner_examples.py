"""Which answers judge, and which are learned from."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from learned_state import numbered_example

from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_examples import RecentExamples

STEP = SimpleNamespace(batch=4, length=40)


CONFIG = LearnerConfig(held_out_every=5, max_held_out=2, passes=4, num_anchors=0)


@pytest.fixture
def buffer(tmp_path):
    buffer = ReplayBuffer(folder=tmp_path / "replay", pair="a-b")
    for number in range(1, 31):
        buffer.append(numbered_example(number))
    return buffer


@pytest.fixture
def recent(buffer):
    return RecentExamples(buffer, CONFIG)


def numbers(recent, new):
    """Of the examples that a lesson learns from, in the order of its rows."""
    return [int(row.pieces[0]) for batch in recent.batches(new, STEP, ()) for row in batch]


def test_one_answer_in_so_many_judges_and_only_the_latest_ones_do(recent):
    new = recent.read(newest=0)
    assert not any(number % 5 == 0 for number in new)
    assert list(recent.held_back) == [25, 30]


def test_an_answer_that_judges_no_more_is_learned_from_but_is_not_new(buffer):
    recent = RecentExamples(buffer, replace(CONFIG, passes=8))
    recent.read(newest=0)
    new = recent.read(newest=20)
    assert new == [21, 22, 23, 24, 26, 27, 28, 29]
    assert set(numbers(recent, new)) & set(range(5, 31, 5)) == {5, 10, 15, 20}


def test_what_judges_is_never_learned_from(recent):
    recent.read(newest=0)
    new = recent.read(newest=20)
    assert not {25, 30} & set(numbers(recent, new))


def test_a_lesson_learns_from_each_new_answer_once_and_thrice_as_often_from_older_ones(recent):
    recent.read(newest=0)
    new = recent.read(newest=20)
    times = Counter(numbers(recent, new))
    assert [times.pop(number) for number in new] == [1] * 8
    assert sum(times.values()) == 3 * 8
    assert max(times) <= 20


def test_a_lesson_that_is_given_anew_by_another_process_has_the_same_rows(buffer):
    """One that read answers as they came, and moved on those that judge no more, and one that
    reads all of them at once."""
    config = replace(CONFIG, max_held_out=4)
    came = RecentExamples(buffer, config)
    came.read(newest=0)
    for number in range(31, 51):
        buffer.append(numbered_example(number))
        came.read(newest=30)
    anew = RecentExamples(buffer, config)
    new = anew.read(newest=40)
    assert came.read(newest=40) == new == [41, 42, 43, 44, 46, 47, 48, 49]
    assert numbers(came, new) == numbers(anew, new)
    other = RecentExamples(buffer, replace(config, seed=1))
    other.read(newest=40)
    assert numbers(other, new) != numbers(anew, new)
