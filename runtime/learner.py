"""Learning from use: kept answers become lessons, and a lesson a better adapter."""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from omnidraft_npu.errors import StateError
from omnidraft_npu.progress import Report
from omnidraft_npu.replay import Example, ReplayBuffer

from .adapter_store import BASE, AdapterStore
from .learner_adapter import Adapter, AdapterInUse
from .learner_anchors import Anchors
from .learner_config import LearnerConfig
from .learner_examples import RecentExamples
from .learner_judge import Acceptance, Judge
from .learner_lesson import Lesson, judged
from .learner_state import Progress, read_training, training_path, write_training
from .lora_trainer import LoraTrainer, TrainingStep, Update

logger = logging.getLogger(__name__)

_WITHOUT = Adapter.of(BASE, {})

Pause = Callable[[], None]

_EXPLODED = 1.5
"""Times its first loss, and one more, that a lesson's last one may be."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tools:
    """What only a lesson needs."""

    step: TrainingStep
    """Of the drafter."""
    judge: Judge
    """Of the graph that drafts."""
    anchors: Anchors
    """Go into every update, see `learner_anchors`."""


class Learner:
    """Learns from kept answers; `learner_opening.open_learner` makes one.

    What it does is a function of the examples in their order and of the seed. Nothing is
    saved before a lesson has ended, so one that is broken off is begun anew the next time.
    """

    def __init__(
        self,
        config: LearnerConfig,
        *,
        buffer: ReplayBuffer,
        store: AdapterStore,
        adapter: AdapterInUse,
        tools: Callable[[], Tools],
        changing: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Join the parts; no other process may train meanwhile, see `only_learner`.

        Args:
            config: When and how it learns.
            buffer: Where answers are kept.
            store: Where adapters are kept.
            adapter: Is given each new version.
            tools: Opens what a lesson needs; called for the first one.
            changing: Entered while something is saved.
        """
        self.config = config
        self._open_tools, self._changing = tools, changing
        self._tools: Tools | None = None
        self._buffer, self._store, self._adapter = buffer, store, adapter
        self._path = training_path(buffer.folder)
        self._examples = RecentExamples(buffer, config)
        self._told: set[str] = set()
        self._recall()

    @property
    def num_new(self) -> int:
        """Answers that the next lesson will have for new."""
        return len(self._new())

    @property
    def is_due(self) -> bool:
        """Whether there are answers enough for a lesson."""
        return self.num_new >= self.config.batch

    def step(
        self, pause: Pause = lambda: None, report: Report = lambda stage, done, total: None
    ) -> Lesson | None:
        """One lesson, if there are answers enough; None if not, or if it could not be saved.

        Args:
            pause: Called between updates; it may wait. What it raises breaks the lesson off.
            report: Is given the updates made so far, and the adapters evaluated.

        Raises:
            BundleError: the training graph does not fit the drafter.
            StateError: adapters or examples were changed meanwhile, so nothing was saved.
        """
        started = time.perf_counter()
        new = self._new()
        if len(new) < self.config.batch:
            return None
        try:
            lesson = self._learn(new, pause, report)
        except OSError as error:
            self._recall()
            self._tell(f"what was learned cannot be saved: {error}")
            return None
        except BaseException:
            self._recall()
            raise
        return replace(lesson, seconds=time.perf_counter() - started)

    def _new(self) -> list[int]:
        """Numbers of the answers that no lesson has learned from yet, the latest ones.

        They are many where an adapter of another rank, or none that is whole, was learned before.
        """
        return self._examples.read(self._progress.newest)[-self.config.max_new :]

    def cancel(self) -> None:
        """Let an update that another thread is in end at once, to be done anew later."""
        if self._tools is not None:
            self._tools.step.cancel()

    def _recall(self) -> None:
        """Be where the last lesson that was saved ended."""
        self._progress, self._state = read_training(self._path, self._store.key)
        self._trainer: LoraTrainer | None = None

    def _learn(self, new: list[int], pause: Pause, report: Report) -> Lesson:
        self._tools = tools = self._tools or self._open_tools()
        trainer, current = self._resume(tools.step)
        pause()
        batches = list(self._examples.batches(new, tools.step, tools.anchors, pause))
        updates = []
        for number, rows in enumerate(batches, start=1):
            updates.append(self._update(trainer, rows, tools.judge, pause))
            report("learning", number, len(batches))
        losses = [update.loss for update in updates]
        is_sound = all(update.norm is not None for update in updates)
        is_sound &= losses[-1] <= _EXPLODED * losses[0] + 1
        held = self._examples.held_back
        base = tools.judge.drafts(_WITHOUT, held, pause)
        report("evaluating", 1, 3)
        before = tools.judge.drafts(current, held, pause)
        report("evaluating", 2, 3)
        after = list(tools.judge.outcomes(trainer.lora, held.values(), pause)) if is_sound else []
        report("evaluating", 3, 3)
        lesson = Lesson(
            outcome=judged(base, before, after, self.config) if is_sound else "skipped",
            version=current.version,
            num_examples=len(new),
            num_updates=len(losses),
            loss=float(np.mean(losses)),
            base=Acceptance.of(base),
            before=Acceptance.of(before),
            after=Acceptance.of(after),
            seconds=0.0,
        )
        # Before too: what was erased is not made again just to hold the lock in it.
        self._check_unchanged(current, max(new))
        with self._changing():
            self._check_unchanged(current, max(new))
            return self._save(lesson, max(new), trainer, current)

    def _check_unchanged(self, current: Adapter, newest: int) -> None:
        """Let nothing come back that was rolled back, imported over or forgotten meanwhile.

        Raises:
            StateError: another version is in use, or the examples are gone.
        """
        if self._store.current != current.version or not self._buffer.has(newest):
            raise StateError(
                "what was learned is not saved, since adapters or examples were changed meanwhile: "
                "the next lesson starts from what is there now"
            )

    def _resume(self, step: TrainingStep) -> tuple[LoraTrainer, Adapter]:
        """The trainer, where it was left, and the version in use."""
        version = self._store.current
        if version != self._adapter.adapter.version:
            self._adapter.adapter = Adapter.of(version, self._store.load(version))
        current = self._adapter.adapter
        if self._progress.parent != version:
            self._progress = Progress(parent=version, newest=self._progress.newest)
            self._trainer, self._state = None, {}
        if self._trainer is None:
            self._trainer = self._new_trainer(step, current)
            if self._state:
                try:
                    self._trainer.restore(self._state)
                except ValueError as error:
                    self._tell(f"learning goes on from the adapter in use: {error}")
                    self._trainer = self._new_trainer(step, current)
        return self._trainer, current

    def _new_trainer(self, step: TrainingStep, start: Adapter) -> LoraTrainer:
        return LoraTrainer(
            step,
            self.config.optimizer,
            loss=self.config.loss,
            is_joint=self.config.is_joint,
            start=start.tensors,
        )

    def _save(self, lesson: Lesson, newest: int, trainer: LoraTrainer, current: Adapter) -> Lesson:
        """Write what came of a lesson."""
        assert self._tools is not None, "a lesson has tools"
        progress = replace(
            self._progress,
            newest=newest,
            num_examples=self._progress.num_examples + lesson.num_examples,
            num_updates=self._progress.num_updates + lesson.num_updates,
        )
        adapter = current
        if lesson.outcome == "kept":
            assert lesson.before is not None
            assert lesson.after is not None
            tensors = trainer.tensors
            record = self._store.add(
                tensors,
                parent=current.version,
                num_examples=progress.num_examples,
                num_updates=progress.num_updates,
                acceptance_before=lesson.before.mean,
                acceptance_after=lesson.after.mean,
            )
            self._store.use(record.version)
            adapter = Adapter.of(record.version, tensors)
        elif lesson.outcome == "withdrawn":
            self._store.use(BASE)
            adapter = _WITHOUT
        if lesson.outcome not in ("kept", "continued"):
            trainer = self._new_trainer(self._tools.step, adapter)
        if lesson.outcome != "continued":
            progress = Progress(parent=adapter.version, newest=newest)
        write_training(self._path, progress, trainer.state(), self._store.key)
        self._adapter.adapter = adapter
        self._progress, self._trainer, self._state = progress, trainer, {}
        return replace(lesson, version=adapter.version)

    def _update(
        self, trainer: LoraTrainer, rows: list[Example], judge: Judge, pause: Pause
    ) -> Update:
        """One step, begun anew after each time that it was called off."""
        pause()
        weights = None
        if self.config.loss == "near":
            weights = judge.overlaps(trainer.lora, rows)
        while True:
            with contextlib.suppress(InterruptedError):
                return trainer.update(rows, weights)
            pause()

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)
