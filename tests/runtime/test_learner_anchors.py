"""Text of other kinds, that what is learned must not cost."""

import shutil
from dataclasses import replace

import pytest
from lessons_given import FAST, opened, teach

from omnidraft_npu.runtime.learner_anchors import Anchors
from omnidraft_npu.runtime.learner_judge import Acceptance, Judge
from omnidraft_npu.runtime.lora_trainer import TrainingStep


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def test_with_anchors_it_goes_on_drafting_other_text_as_it_did(learning_original, tmp_path):
    shares = []
    for number in (0, 2):
        copy = shutil.copytree(learning_original, tmp_path / str(number))
        _, adapter = teach(copy, replace(FAST, num_anchors=number))
        drafter = opened(copy).drafter
        judge = Judge(drafter.graph)
        anchors = Anchors(drafter.tokenizer, judge, max_pieces=40, num_top=32)
        untouched = Acceptance.of(list(judge.outcomes({}, anchors))).sampled
        shares.append(
            Acceptance.of(list(judge.outcomes(adapter.lora, anchors))).sampled / untouched
        )
    assert len(anchors) > 100
    assert shares[0] < 0.9
    assert shares[1] > shares[0] + 0.05


def test_only_the_anchors_that_a_lesson_takes_are_made(bundle, monkeypatch):
    """Each is a pass of the drafter; a process may end after one lesson."""
    made, laws = [], Judge.laws
    monkeypatch.setattr(Judge, "laws", lambda *args, **more: made.append(1) or laws(*args, **more))
    (lesson,), _ = teach(bundle, replace(FAST, num_anchors=2), rounds=1)
    assert 0 < len(made) <= 2 * lesson.num_updates


def test_an_anchor_teaches_the_acceptance_head_nothing(bundle):
    drafter = opened(bundle).drafter
    anchors = Anchors(drafter.tokenizer, Judge(drafter.graph), max_pieces=40, num_top=8)
    step = TrainingStep(bundle / drafter.entry.training.path, threads=1)
    batch = step.batch_of([anchors[0]], "overlap")
    assert batch["overlap_weight"].any()
    assert not batch["head_weight"].any()
