"""Lessons that give way to other work."""

import shutil
import threading
import time

import numpy as np
import pytest
from lessons_given import FAST, answer_all, opened, teach

from omnidraft_npu.errors import StateError
from omnidraft_npu.runtime.learner_background import BackgroundLearner
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.session import Session


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def test_lessons_wait_while_something_else_is_at_work(bundle):
    pair = opened(bundle)
    lessons, began = [], time.monotonic()
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(Session(pair), learner)

        def is_busy():
            assert not lessons or time.monotonic() > began + 0.6
            return time.monotonic() < began + 0.6

        began = time.monotonic()
        assert BackgroundLearner(learner, is_busy, quiet_s=0.02).run(lessons.append, max_s=60)
    assert lessons[0].outcome == "kept"
    assert pair.adapter.adapter.version == lessons[0].version


def test_an_update_that_other_work_cancels_is_made_again_and_learns_the_same(
    learning_original, tmp_path, monkeypatch
):
    monkeypatch.setattr("omnidraft_npu.runtime.learner_background._POLL_S", 0.002)
    _, expected = teach(shutil.copytree(learning_original, tmp_path / "alone"), rounds=1)
    pair = opened(shutil.copytree(learning_original, tmp_path / "disturbed"))
    lessons, looks = [], iter(range(10**6))
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(Session(pair), learner)
        disturbed = BackgroundLearner(learner, lambda: next(looks) % 8 == 0, quiet_s=0.0)
        disturbed.run(lessons.append, max_s=60)
    for name, tensor in expected.lora.items():
        np.testing.assert_array_equal(tensor, pair.adapter.adapter.lora[name])


@pytest.mark.parametrize("how", ["asked", "time"])
def test_it_ends_without_a_lesson_when_asked_to_or_when_the_time_is_up(bundle, how):
    pair = opened(bundle)
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(Session(pair), learner)
        background = BackgroundLearner(learner, lambda: True)
        if how == "asked":
            threading.Timer(0.1, background.end).start()
        began = time.monotonic()
        has_ended = background.run(pytest.fail, max_s=60 if how == "asked" else 0.1)
        assert has_ended
        assert time.monotonic() < began + 5
        assert learner.is_due


def test_what_a_lesson_raises_reaches_the_caller(bundle, monkeypatch):
    def fail(*_):
        raise StateError("nobody may write")

    pair = opened(bundle)
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(Session(pair), learner)
        monkeypatch.setattr(learner, "_save", fail)
        with pytest.raises(StateError, match="nobody may write"):
            BackgroundLearner(learner, lambda: False).run(pytest.fail, max_s=60)
