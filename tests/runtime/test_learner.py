"""Learning from use: what is recorded, when it is learned from, and what comes of it."""

import contextlib
import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from learning_bundle import RANK

from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.errors import ConfigError, StateError
from omnidraft_npu.files import sha256_of
from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.runtime.adamw import AdamWConfig
from omnidraft_npu.runtime.adapter_store import BASE
from omnidraft_npu.runtime.learner_anchors import Anchors
from omnidraft_npu.runtime.learner_background import BackgroundLearner
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_judge import Acceptance, Judge
from omnidraft_npu.runtime.learner_opening import can_learn, open_learner
from omnidraft_npu.runtime.lora_trainer import TrainingStep
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.session import Session
from omnidraft_npu.state_folder import learning, replay_path

FAST = LearnerConfig(
    batch=4,
    passes=4,
    num_anchors=0,
    held_out_every=2,
    min_judged=20,
    optimizer=AdamWConfig(learning_rate=0.01, warmup_steps=2),
)
PROMPTS = [f"the {word} drafter verifies {n}" for word in ("small", "large") for n in range(6)]


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


def opened(bundle, target="target"):
    return open_pair(bundle, target=target, threads=1, proposer="model")


def answer(session, prompt, **sampling):
    config = DecodeConfig(max_new_tokens=24, sampling=SamplingConfig(**sampling))
    session.reset()
    deltas = list(session.generate(session.encode(prompt, raw=True), config))
    return [i for delta in deltas for i in delta.token_ids], deltas[-1].stats


def answer_all(session, learner, prompts=PROMPTS):
    session.observer = learner
    return [answer(session, prompt)[0] for prompt in prompts]


def examples_of(bundle, target="target"):
    pair = opened(bundle, target)
    hashes = f"{pair.drafter.entry.tokenizer_sha256}-{pair.target.entry.tokenizer_sha256}"
    return list(ReplayBuffer(folder=replay_path(bundle, target), pair=hashes).examples())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "top_k": 3, "seed": 4}])
def test_what_is_recorded_is_the_law_that_the_target_itself_gives(bundle, sampling):
    """Whatever was drafted, and whatever the sampling options cut off."""
    pair = opened(bundle)
    session, kept = Session(pair), []

    class Observer:
        decoding = staticmethod(contextlib.nullcontext)
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
    with open_learner(pair, FAST, threads=1) as learner:
        session.observer = learner
        list(session.generate(session.encode("a", raw=True), DecodeConfig(max_new_tokens=7)))
    assert not examples_of(bundle)


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


def teach(bundle, config=FAST, rounds=2):
    """Lessons from the same answers; what they said, and the adapter in the end."""
    pair = opened(bundle)
    session = Session(pair)
    with open_learner(pair, config, threads=1) as learner:
        lessons = []
        for _ in range(rounds):
            answer_all(session, learner)
            lessons.append(learner.step())
    return lessons, pair.adapter.adapter


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


def spoil(monkeypatch, change):
    """Let every loss, and the gradients, be what `change` makes of them."""
    run = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda *args: change(*run(*args)))


def test_a_loss_that_is_no_number_is_said_and_not_saved(bundle, monkeypatch, caplog):
    spoil(monkeypatch, lambda _, gradients: (float("nan"), gradients))
    (lesson, *_), adapter = teach(bundle, rounds=1)
    assert lesson.outcome == "skipped"
    assert adapter.version == BASE
    assert "skipped" in caplog.text
    assert not list((bundle / "state" / "adapters").rglob("*.onnx_adapter"))


def test_a_loss_that_explodes_is_not_saved(bundle, monkeypatch):
    losses = iter(10.0**n for n in range(50))
    spoil(monkeypatch, lambda _, gradients: (next(losses), gradients))
    (lesson, *_), adapter = teach(bundle, rounds=1)
    assert lesson.outcome == "skipped"
    assert adapter.version == BASE


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


def test_a_lesson_that_is_broken_off_is_given_anew(learning_original, tmp_path):
    _, expected = teach(shutil.copytree(learning_original, tmp_path / "whole"), rounds=1)
    broken = shutil.copytree(learning_original, tmp_path / "broken")
    pair = opened(broken)
    session = Session(pair)
    left = iter(range(2))

    def interrupt():
        if next(left, None) is None:
            raise KeyboardInterrupt

    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(session, learner)
        with pytest.raises(KeyboardInterrupt):
            learner.step(interrupt)
        assert learner.step().outcome == "kept"
    for name, tensor in expected.lora.items():
        np.testing.assert_array_equal(tensor, pair.adapter.adapter.lora[name])


def test_a_full_disk_is_said_once_and_decoding_goes_on(bundle, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReplayBuffer, "append", fail)
    pair = opened(bundle)
    session = Session(pair)
    with open_learner(pair, FAST, threads=1) as learner:
        assert all(answer_all(session, learner))
        assert learner.step() is None
    assert caplog.text.count("No space") == 1


def test_what_cannot_be_saved_is_said_and_learned_later(bundle, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    pair = opened(bundle)
    session = Session(pair)
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(session, learner)
        with monkeypatch.context() as context:
            context.setattr("omnidraft_npu.runtime.learner.write_training", fail)
            assert learner.step() is None
        assert "cannot be saved" in caplog.text
        assert pair.adapter.adapter.version == BASE
        assert learner.step() is not None


def test_only_one_learns_at_a_time(bundle):
    pair = opened(bundle)
    with (
        learning(bundle, "target"),
        pytest.raises(StateError, match="no-learn"),
        open_learner(pair, FAST, threads=1),
    ):
        pass
    with open_learner(pair, FAST, threads=1):
        pass


def test_an_adapter_for_another_drafter_is_named_and_not_used(bundle, caplog):
    _, adapter = teach(bundle)
    assert adapter.version != BASE
    store = opened(bundle).adapter.store
    record = store._record_path(adapter.version)
    text = record.read_text().replace(store.key.drafter_sha256, "0" * 64)
    record.write_text(text)
    pair = opened(bundle)
    assert pair.adapter.adapter.version != adapter.version
    assert "made for another drafter" in caplog.text
    assert answer(Session(pair), PROMPTS[0])[0]


def test_a_bundle_without_a_training_graph_does_not_learn(bundle):
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["drafter"]["training"] = None
    path.write_text(json.dumps(manifest))
    assert not can_learn(opened(bundle))
    assert not can_learn(open_pair(bundle, target="target", use_drafter=False))


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


@pytest.mark.parametrize(
    ("name", "value"), [("batch", 0), ("passes", 0), ("held_out_every", 1), ("new_passes", 5)]
)
def test_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        LearnerConfig(**{name: value})


def until(is_true, seconds=60):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_rank_is_that_of_the_bundle(bundle):
    pair = opened(bundle)
    assert pair.adapter.store.key.rank == RANK
