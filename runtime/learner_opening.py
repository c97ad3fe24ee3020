"""A learner for a target of a bundle."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from omnidraft_npu.bundle import Bundle
from omnidraft_npu.config import DeviceConfig
from omnidraft_npu.manifest import ModelEntry
from omnidraft_npu.state_folder import learning, only_learner

from .answer_keeper import can_learn
from .learner import Learner, Tools
from .learner_adapter import AdapterInUse, open_adapter
from .learner_anchors import Anchors
from .learner_config import NUM_TOP, LearnerConfig
from .learner_judge import Judge
from .learner_report import read_report
from .learner_state import read_training, training_path
from .lora_trainer import Loss, TrainingStep
from .opened_pair import OpenedModel, OpenedPair, open_drafter
from .past_recall import replay_of


@contextlib.contextmanager
def open_learner(
    pair: OpenedPair,
    config: LearnerConfig,
    *,
    threads: int | None = None,
    busy: Callable[[], None] | None = None,
) -> Iterator[Learner]:
    """Learn for a pair, for the block; no other process learns for this target meanwhile.

    Args:
        pair: With `can_learn`; what is learned is its adapter from then on.
        config: When and how.
        threads: Threads of one operator of the training graph.
        busy: Called if another process is learning, see `only_learner`.

    Raises:
        StateError: another process is learning, or what is learned cannot be written.
        ValueError: the pair cannot learn.
    """
    bundle, drafter, target = pair.bundle, pair.drafter, pair.target.entry
    if not can_learn(pair) or bundle is None or drafter is None:
        raise ValueError("this pair has no graph to learn with")
    with only_learner(bundle.state_root, target.name, busy):
        yield _learner(bundle, target, lambda: drafter, pair.adapter, config, threads)


@contextlib.contextmanager
def open_learner_alone(
    bundle: Bundle,
    target: ModelEntry,
    config: LearnerConfig,
    *,
    threads: int | None = None,
    devices: DeviceConfig,
) -> Iterator[Learner]:
    """The same without a conversation: the target is not opened, the drafter when it is time.

    Args:
        bundle: Its drafter can learn.
        target: Whose kept answers are learned from.
        config, threads: See `open_learner`.
        devices: Where the drafter runs that is evaluated.

    Raises:
        StateError: another process is learning, or what is learned cannot be written.
    """

    def drafter() -> OpenedModel:
        return open_drafter(bundle, devices=devices, threads=threads)

    with only_learner(bundle.state_root, target.name):
        yield _learner(bundle, target, drafter, open_adapter(bundle, target), config, threads)


def num_to_learn_from(bundle: Bundle, target: ModelEntry, config: LearnerConfig) -> int:
    """Kept answers that no lesson has learned from yet; cheaply, so damaged ones count too.

    After a failure only the answers since then count, so that it is not repeated at once.
    """
    adapter = open_adapter(bundle, target)
    if bundle.manifest.drafter.training is None or adapter.store is None:
        return 0
    buffer = replay_of(bundle, target)
    progress, _ = read_training(training_path(buffer.folder), adapter.store.key)
    report = read_report(bundle, target)
    failed_at = report.newest if report is not None and report.error is not None else 0
    numbers = buffer.numbers(after=max(progress.newest, failed_at))
    return sum(not config.is_held_out(number) for number in numbers)


def _learner(
    bundle: Bundle,
    target: ModelEntry,
    open_drafter: Callable[[], OpenedModel],
    adapter: AdapterInUse,
    config: LearnerConfig,
    threads: int | None,
) -> Learner:
    training, store = bundle.manifest.drafter.training, adapter.store
    if training is None or store is None:
        raise ValueError("this drafter has no graph to learn with")
    path = bundle.path(training.path)
    return Learner(
        config,
        buffer=replay_of(bundle, target),
        store=store,
        adapter=adapter,
        tools=lambda: _open_tools(open_drafter(), path, config.loss, threads),
        changing=lambda: learning(bundle.state_root, target.name),
    )


def _open_tools(drafter: OpenedModel, path: Path, loss: Loss, threads: int | None) -> Tools:
    step = TrainingStep(path, threads=threads)
    step.check(loss)
    judge = Judge(drafter.graph)
    max_pieces = min(step.length, drafter.graph.context_length)
    anchors = Anchors(drafter.tokenizer, judge, max_pieces=max_pieces, num_top=NUM_TOP)
    return Tools(step=step, judge=judge, anchors=anchors)
