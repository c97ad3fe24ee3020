"""What is better and what is worse, response by response, and what comes of a lesson by it."""

import math
from dataclasses import replace

import numpy as np
import pytest

from omnidraft_npu.runtime.learner_changes import changes
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_judge import Acceptance
from omnidraft_npu.runtime.learner_lesson import Lesson, judged

NUM_TOKENS = 100
CONFIG = LearnerConfig(min_judged=200, num_latest=8)


def drafted(greedy, sampled):
    """Responses of a hundred tokens of a piece each, by how many are drafted and their overlap."""
    return [
        (np.arange(NUM_TOKENS) < right, np.full(NUM_TOKENS, overlap, np.float32))
        for right, overlap in zip(greedy, np.broadcast_to(sampled, len(greedy)), strict=True)
    ]


BEFORE = drafted([40, 60, 20, 50, 30, 45, 55, 35], 0.4)


def step(greedy, sampled=0.4):
    """The same with more or fewer tokens drafted of each response."""
    before = [int(right.sum()) for right, _ in BEFORE]
    return drafted(np.add(before, greedy), sampled)


def test_of_tokens_in_responses_of_one_token_it_is_mcnemars_test():
    """Twelve tokens were not drafted and are now, three the other way round."""
    was = np.repeat([0, 1, 1, 0], [12, 3, 50, 35]).astype(bool)
    now = np.repeat([1, 0, 1, 0], [12, 3, 50, 35]).astype(bool)
    one = np.zeros(1, np.float32)
    before, after = ([(right, one) for right in np.split(flags, 100)] for flags in (was, now))
    found = changes(before, after).greedy
    assert found.gain == pytest.approx((12 - 3) / 100)
    assert found.gain / found.chance * 1.64 == pytest.approx((12 - 3) / math.sqrt(12 + 3))


def test_changes_are_those_of_the_acceptance():
    after = step([3, -1, 4, 1, -5, 9, 2, 6], 0.43)
    found, first, last = changes(BEFORE, after), Acceptance.of(BEFORE), Acceptance.of(after)
    for name in ("greedy", "sampled", "mean"):
        gain = getattr(last, name) - getattr(first, name)
        assert getattr(found, name).gain == pytest.approx(gain, abs=1e-6)


def test_how_far_responses_differ_from_each_other_does_not_matter():
    apart = changes(BEFORE, step([2] * 8)).greedy
    alike = changes(drafted([40] * 8, 0.4), drafted([42] * 8, 0.4)).greedy
    assert apart == alike
    assert apart.is_better


@pytest.mark.parametrize(
    ("greedy", "sampled", "outcome"),
    [
        # All gain a little, or most: chance does not do that.
        ([1] * 8, 0.4, "kept"),
        ([0] * 8, 0.41, "kept"),
        ([3, 2, 0, 1, -1, 2, 3, 1], 0.4, "kept"),
        # A larger gain, but of one response.
        ([20, 0, 0, 0, 0, 0, 0, 0], 0.4, "continued"),
        ([9, -8, 7, -6, 9, -7, 8, -6], 0.4, "continued"),
        ([0] * 8, 0.4, "continued"),
        # One is paid for with the other.
        ([5] * 8, 0.39, "continued"),
        ([-1] * 8, 0.5, "continued"),
        # A loss that chance explains, but more than is let pass.
        ([9, -9, 9, -9, 9, -9, -9, -9], 0.5, "continued"),
        ([6, -6, 6, -6, 6, -6, 0, -2], 0.46, "kept"),
        ([-1] * 8, 0.4, "rolled back"),
        ([-20, 0, 0, 0, 0, 0, 0, 0], 0.4, "continued"),
        ([0] * 8, math.nan, "skipped"),
    ],
)
def test_what_chance_does_not_explain_decides(greedy, sampled, outcome):
    assert judged(BEFORE, BEFORE, step(greedy, sampled), CONFIG) == outcome


SHIFTED = {"base": BEFORE * 4, "before": BEFORE * 4, "config": CONFIG}
"""Of the 32 responses that judge the latest 8 are of another kind than the others."""


def test_to_be_better_on_the_latest_responses_is_enough():
    """After a change of what is asked the noise of all before would hide it."""
    after = [*step([8, -8] * 4) * 3, *step([3] * 8)]
    assert judged(**SHIFTED, after=after) == "kept"
    for num_latest in (16, 32):
        alike = SHIFTED | {"config": replace(CONFIG, num_latest=num_latest)}
        assert judged(**alike, after=after) == "continued"


def test_only_the_latest_have_a_say_of_their_own():
    after = [*step([3] * 8), *step([8, -8] * 4) * 3]
    assert judged(**SHIFTED, after=after) == "continued"


@pytest.mark.parametrize(
    ("old", "latest", "outcome"),
    [
        # All together surely lose of the mean, or of one of the two.
        (([-2] * 8, 0.4), ([3] * 8, 0.4), "rolled back"),
        (([-2] * 8, 0.44), ([3] * 8, 0.4), "continued"),
        (([8, -8] * 4, 0.36), ([8] * 8, 0.43), "continued"),
        # The latest gain one of the two for the other.
        (([8, -8] * 4, 0.4), ([-2] * 8, 0.5), "continued"),
        # All together may lose what chance explains.
        (([8, -9] * 4, 0.4), ([2] * 8, 0.4), "kept"),
    ],
)
def test_all_together_must_not_surely_speak_against_the_latest(old, latest, outcome):
    assert judged(**SHIFTED, after=[*step(*old) * 3, *step(*latest)]) == outcome


def test_the_latest_must_be_better_than_no_adapter_too():
    base = [*step([9, -9] * 4) * 3, *step([6] * 8)]
    after = [*step([-8, 8] * 4) * 3, *step([3] * 8)]
    assert judged(**SHIFTED, after=after) == "kept"
    assert judged(**SHIFTED | {"base": base}, after=after) == "continued"


def test_the_latest_decide_nothing_by_few_tokens():
    after = [*step([8, -8] * 4) * 3, *step([3] * 8)]
    few = SHIFTED | {"config": replace(CONFIG, min_judged=801)}
    assert judged(**few, after=after) == "continued"


def test_without_tokens_enough_nothing_is_decided():
    for after in (step([1] * 8), step([-1] * 8), step([0] * 8, math.nan)):
        assert judged(BEFORE, BEFORE, after, replace(CONFIG, min_judged=801)) == "continued"
    assert judged([], [], [], replace(CONFIG, min_judged=1)) == "continued"


def test_a_lesson_says_what_came_of_it():
    one, other = (Acceptance(greedy=rate, sampled=rate, num_tokens=240) for rate in (0.25, 0.5))
    lesson = Lesson(
        outcome="kept",
        version=3,
        num_examples=8,
        num_updates=5,
        loss=0.7,
        base=one,
        before=one,
        after=other,
        seconds=4.2,
    )
    start = "learned from 8 answers in 4.2 s: "
    figures = f"held-back acceptance 0.250 -> 0.500 over {other.num_tokens} tokens"
    assert str(lesson) == f"{start}kept, {figures}, v0003"
    continued = str(replace(lesson, outcome="continued"))
    assert continued == f"{start}continued, {figures}; not surely better yet, so training goes on"
    later = str(replace(lesson, outcome="rolled back", before=other, after=one))
    tokens = f"over {one.num_tokens} tokens"
    assert later.endswith(f"acceptance 0.500 -> 0.250 {tokens} (without an adapter 0.250)")
    assert str(replace(lesson, outcome="skipped")).endswith("skipped, its loss is 0.7")


def test_one_response_alone_decides_nothing():
    before, after = drafted([40], 0.4), drafted([90], 0.9)
    assert judged(before, before, after, replace(CONFIG, min_judged=50)) == "continued"
    assert judged(after, after, before, replace(CONFIG, min_judged=50)) == "continued"


def test_small_losses_do_not_add_up_against_the_drafter_without_an_adapter():
    """Each version is hardly worse than the last for one of them, and better for the other."""
    base = BEFORE
    before = step([3, -4] * 4, 0.43)
    after = step([-1] * 8, 0.46)
    assert judged(base, base, before, CONFIG) == "kept"
    assert judged(before, before, after, CONFIG) == "kept"
    assert judged(base, before, after, CONFIG) == "continued"


def test_a_version_that_became_worse_than_none_is_withdrawn():
    """As where another kind of answers is held back now than when it was kept."""
    base, before = step([3] * 8), BEFORE
    assert judged(base, before, step([1] * 8), CONFIG) == "withdrawn"
    assert judged(base, before, before, CONFIG) == "withdrawn"
    assert judged(base, before, step([4] * 8), CONFIG) == "kept"
