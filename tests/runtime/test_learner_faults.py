"""Learning where something is wrong: losses, disks, other processes, other drafters."""

import json
import os
import shutil

import numpy as np
import pytest
from lessons_given import FAST, PROMPTS, answer, answer_all, opened, spoil, teach

from omnidraft_npu.errors import ConfigError, StateError
from omnidraft_npu.forgetting import erase_learned
from omnidraft_npu.replay import ReplayBuffer
from omnidraft_npu.runtime.adapter_store import BASE
from omnidraft_npu.runtime.answer_keeper import can_learn
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.session import Session
from omnidraft_npu.state_folder import learning, only_learner


@pytest.fixture
def bundle(learning_copy):
    return learning_copy


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


@pytest.mark.parametrize("change", ["forget", "roll back"])
def test_what_was_forgotten_or_rolled_back_during_a_lesson_does_not_come_back(bundle, change):
    _, before = teach(bundle)
    assert before.version != BASE
    pair = opened(bundle)
    changes = iter([change])

    def meanwhile():
        if next(changes, None) is None:
            return
        if change == "forget":
            erase_learned(bundle, ["target"])
            return
        with learning(bundle, "target"):
            pair.adapter.store.use(BASE)

    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(Session(pair), learner)
        with pytest.raises(StateError, match="changed meanwhile"):
            learner.step(meanwhile)
    assert pair.adapter.store.current == BASE
    if change == "forget":
        assert not list((bundle / "state").rglob("*.safetensors"))
        assert not list((bundle / "state").rglob("*.onnx_adapter"))


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_a_bundle_that_is_deleted_during_a_lesson_is_not_made_again(bundle):
    pair = opened(bundle)
    with open_learner(pair, FAST, threads=1) as learner:
        answer_all(Session(pair), learner)
        with pytest.raises(StateError, match="changed meanwhile"):
            learner.step(lambda: shutil.rmtree(bundle, ignore_errors=True))
    assert not bundle.exists()


def test_only_one_learns_at_a_time(bundle):
    pair = opened(bundle)
    with (
        only_learner(bundle, "target"),
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


@pytest.mark.parametrize(
    ("name", "value"), [("batch", 0), ("passes", 0), ("held_out_every", 1), ("num_latest", 0)]
)
def test_settings_that_cannot_be_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        LearnerConfig(**{name: value})
