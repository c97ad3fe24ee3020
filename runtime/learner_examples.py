"""Which answers a lesson learns from, and which ones judge it."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from omnidraft_npu.examples import windows
from omnidraft_npu.replay import Example, ReplayBuffer

from .learner_anchors import Anchors
from .learner_config import LearnerConfig
from .lora_trainer import TrainingStep


class RecentExamples:
    """The latest examples of a buffer, read as they come."""

    def __init__(self, buffer: ReplayBuffer, config: LearnerConfig) -> None:
        """Read from `buffer`; one example in `held_out_every` is held back, by its number."""
        self._buffer, self._config = buffer, config
        self._seen = 0
        self._learned: dict[int, Example] = {}
        self._held: dict[int, Example] = {}

    def read(self, newest: int) -> list[int]:
        """Take up what came since the last call.

        Args:
            newest: Number of the last example that was learned from; older ones may be dropped.

        Returns:
            Numbers of the examples to learn from that are newer.
        """
        config = self._config
        for number, example in self._buffer.numbered(after=self._seen):
            (self._held if config.is_held_out(number) else self._learned)[number] = example
            self._seen = number
        for number in sorted(self._held)[: -config.max_held_out]:
            self._learned[number] = self._held.pop(number)
        old = [number for number in self._learned if number <= newest]
        for number in sorted(old)[: -config.num_recent]:
            del self._learned[number]
        newer = (number for number in self._learned if number > newest)
        return sorted(number for number in newer if not config.is_held_out(number))

    @property
    def held_back(self) -> Mapping[int, Example]:
        """Those that judge by their number, the oldest first."""
        return self._held

    def batches(
        self,
        new: list[int],
        step: TrainingStep,
        anchors: Anchors,
        pause: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Example]]:
        """Rows for the training graph: of the new answers and of older ones, mixed, and anchors.

        The same examples, new numbers and seed give the same rows. `pause` is called before
        each batch, whose anchors are passes of the drafter.
        """
        config = self._config
        rng = np.random.default_rng((config.seed, max(new)))
        # Sorted: one that judged once came later here than where all are read anew.
        old = sorted(number for number in self._learned if number < min(new))
        pool = old if len(old) >= len(new) else [*old, *new]
        chosen = list(new)
        for _ in range(config.passes - 1):
            chosen += rng.choice(pool, len(new), replace=False).tolist()
        num_context = min(config.num_context, step.length // 2)
        rows = [
            row
            for number in chosen
            for row in windows(self._learned[number], step.length, num_context=num_context)
        ]
        order = rng.permutation(len(rows)).tolist()
        num_anchors = min(config.num_anchors, len(anchors), step.batch - 1)
        room = step.batch - num_anchors
        for start in range(0, len(order), room):
            pause()
            held = rng.choice(len(anchors), num_anchors, replace=False) if num_anchors else ()
            yield [rows[i] for i in order[start : start + room]] + [anchors[i] for i in held]
