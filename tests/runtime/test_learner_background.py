"""Learning in a thread of its own, which decoding never waits for."""

import shutil
import time

import numpy as np
import pytest
from lessons_given import FAST, answer_all, opened, teach

from omnidraft_npu.runtime.learner_background import BackgroundLearner
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.session import Session


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def until(is_true, seconds=60):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_in_the_background_lessons_wait_while_something_is_decoded(bundle):
    pair = opened(bundle)
    session = Session(pair)
    lessons = []
    with (
        open_learner(pair, FAST, threads=1) as learner,
        BackgroundLearner(learner, lessons.append, quiet_s=0.02) as background,
    ):
        with background.decoding():
            answer_all(session, background)
            time.sleep(0.3)
            assert not lessons
        until(lambda: lessons)
    assert lessons[0].outcome == "kept"
    assert pair.adapter.adapter.version == lessons[0].version


def test_decoding_calls_an_update_off_and_it_is_done_anew(learning_original, tmp_path):
    _, expected = teach(shutil.copytree(learning_original, tmp_path / "alone"), rounds=1)
    pair = opened(shutil.copytree(learning_original, tmp_path / "disturbed"))
    session = Session(pair)
    lessons = []
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(session, learner)
        with BackgroundLearner(learner, lessons.append, quiet_s=0.0) as background:
            while not lessons:
                with background.decoding():
                    time.sleep(0.002)
                time.sleep(0.02)
    for name, tensor in expected.lora.items():
        np.testing.assert_array_equal(tensor, pair.adapter.adapter.lora[name])


def test_ending_does_not_wait_for_a_lesson(bundle):
    pair = opened(bundle)
    session = Session(pair)
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(session, learner)
        with BackgroundLearner(learner, quiet_s=60.0):
            time.sleep(0.05)
        assert learner.is_due
