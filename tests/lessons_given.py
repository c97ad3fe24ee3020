"""A tiny bundle's drafter that learns from answers: what tests of learning share."""

from omnidraft_npu.config import DecodeConfig, SamplingConfig
from omnidraft_npu.runtime.adamw import AdamWConfig
from omnidraft_npu.runtime.answer_keeper import answer_keeper
from omnidraft_npu.runtime.learner_config import LearnerConfig
from omnidraft_npu.runtime.learner_opening import open_learner
from omnidraft_npu.runtime.lora_trainer import TrainingStep
from omnidraft_npu.runtime.opened_pair import open_pair
from omnidraft_npu.runtime.past_recall import replay_of
from omnidraft_npu.runtime.session import Session

FAST = LearnerConfig(
    batch=4,
    passes=4,
    num_anchors=0,
    held_out_every=2,
    min_judged=20,
    optimizer=AdamWConfig(learning_rate=0.01, warmup_steps=2),
)
PROMPTS = [f"the {word} drafter verifies {n}" for word in ("small", "large") for n in range(6)]


def opened(bundle, target="target"):
    return open_pair(bundle, target=target, threads=1, proposer="model")


def answer(session, prompt, **sampling):
    config = DecodeConfig(max_new_tokens=24, sampling=SamplingConfig(**sampling))
    session.reset()
    deltas = list(session.generate(session.encode(prompt, raw=True), config))
    return [i for delta in deltas for i in delta.token_ids], deltas[-1].stats


def answer_all(session, learner, prompts=PROMPTS):
    session.observer = answer_keeper(session.pair, learner.config)
    return [answer(session, prompt)[0] for prompt in prompts]


def examples_of(bundle, target="target"):
    pair = opened(bundle, target)
    return list(replay_of(pair.bundle, pair.target.entry).examples())


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


def spoil(monkeypatch, change):
    """Let every loss, and the gradients, be what `change` makes of them."""
    run = TrainingStep.run
    monkeypatch.setattr(TrainingStep, "run", lambda *args: change(*run(*args)))
