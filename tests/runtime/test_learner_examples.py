"""Which answers judge, and which are learned from."""

from types import SimpleNamespace

import pytest
from learned_state import numbered_example

from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_examples import RecentExamples

STEP = SimpleNamespace(batch=4, length=40)


@pytest.fixture
def recent(tmp_path):
    buffer = ReplayBuffer(folder=tmp_path / "replay", pair="a-b")
    for number in range(1, 31):
        buffer.append(numbered_example(number))
    config = LearnerConfig(held_out_every=5, max_held_out=2, passes=4, num_anchors=0)
    return RecentExamples(buffer, config)


def test_one_answer_in_so_many_judges_and_only_the_latest_ones_do(recent):
    new = recent.read(newest=0)
    assert not any(number % 5 == 0 for number in new)
    assert list(recent.held_back) == [25, 30]


def test_an_answer_that_judges_no_more_is_learned_from_but_is_not_new(recent):
    recent.read(newest=0)
    new = recent.read(newest=20)
    assert new == [21, 22, 23, 24, 26, 27, 28, 29]
    rows = [row for batch in recent.batches(new, STEP, ()) for row in batch]
    judged_once = {int(row.pieces[0]) for row in rows} & set(range(5, 31, 5))
    assert judged_once == {5, 10, 15, 20}


def test_what_judges_is_never_learned_from(recent):
    recent.read(newest=0)
    new = recent.read(newest=20)
    for batch in recent.batches(new, STEP, ()):
        assert not {25, 30} & {int(row.pieces[0]) for row in batch}
