"""How well a drafter with an adapter would have drafted responses that it did not learn from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.distillation import PieceLaws
from omnidraft_npu.replay import Example

from .learner_adapter import Adapter
from .lora_inputs import Tensors
from .model import Model

Floats = npt.NDArray[np.float32]
Drafted = tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]
"""Of a response, ``[tokens]`` whether drafted, and ``[pieces]`` the laws' overlap."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Conditional acceptance given the true text before, over all tokens of some responses."""

    greedy: float
    """Share of the target's tokens whose every piece is the drafter's likeliest one."""
    sampled: float
    """Mean overlap, sum of the smaller one, of the target's and the drafter's law over pieces."""
    num_tokens: int
    """That it was found from."""

    @property
    def mean(self) -> float:
        """Of both: a drafter must not pay for the one with the other."""
        return (self.greedy + self.sampled) / 2

    @classmethod
    def of(cls, drafts: Sequence[Drafted]) -> "Acceptance | None":
        """Over all of some responses; None where there is no token."""
        right = np.concatenate([right for right, _ in drafts] or [np.zeros(0, np.bool_)])
        if not len(right):
            return None
        overlap = np.concatenate([overlap for _, overlap in drafts])
        return cls(greedy=float(right.mean()), sampled=float(overlap.mean()), num_tokens=len(right))


class Judge:
    """Runs the graph that really drafts, in a conversation of its own."""

    def __init__(self, graph: Model) -> None:
        """Judge adapters of this drafter."""
        self._lm = graph.begin(is_exact=False)
        self._known: dict[int, dict[int, Drafted]] = {}

    def drafts(
        self,
        adapter: Adapter,
        examples: Mapping[int, Example],
        pause: Callable[[], None] = lambda: None,
    ) -> list[Drafted]:
        """What a version would have drafted of responses; of each it is found out only once.

        Args:
            adapter: The version.
            examples: Responses by their number, which is theirs for ever.
            pause: Called before each that is new.
        """
        known = self._known.setdefault(adapter.version, {})
        new = {number: one for number, one in examples.items() if number not in known}
        found = self.outcomes(adapter.lora, new.values(), pause)
        known.update(zip(new, found, strict=True))
        return [known[number] for number in examples]

    def overlaps(self, lora: Tensors, examples: Iterable[Example]) -> list[npt.NDArray[np.float32]]:
        """``[response]`` overlap of the laws at every piece of each example with a piece before."""
        return [shared for _, shared in self.outcomes(lora, examples)]

    def outcomes(
        self,
        lora: Tensors,
        examples: Iterable[Example],
        pause: Callable[[], None] = lambda: None,
    ) -> Iterator[Drafted]:
        """What the drafter with this adapter would have drafted of each example."""
        self._lm.set_lora(lora)
        for example in examples:
            pause()
            yield self._one(example)

    def laws(self, pieces: Sequence[int], count: int, *, num_top: int) -> PieceLaws:
        """What the drafter says without an adapter before each of the last `count` pieces.

        Args:
            pieces: More than `count`, and no more than the drafter's context holds.
            count: At least 1.
            num_top: Pieces that a law names.
        """
        self._lm.set_lora({})
        logits = self._score(pieces, count)
        num_top = min(num_top, logits.shape[1])
        ids = np.argpartition(-logits, num_top - 1, axis=1)[:, :num_top]
        ids = np.take_along_axis(ids, np.take_along_axis(-logits, ids, axis=1).argsort(axis=1), 1)
        return PieceLaws(ids=ids.astype(np.int32), probs=_probs_of(logits, ids))

    def _score(self, pieces: Sequence[int], count: int) -> Floats:
        """``[count, vocab]`` logits before each of the last pieces."""
        self._lm.reset()
        first = len(pieces) - count
        self._lm.prefill(pieces[: first - 1])
        return self._lm.score(pieces[first - 1 : -1])

    def _one(self, example: Example) -> Drafted:
        pieces = example.pieces[-self._lm.context_length :].tolist()
        count = min(example.num_response, len(pieces) - 1)
        if count < 1:
            return np.zeros(0, np.bool_), np.zeros(0, np.float32)
        logits = self._score(pieces, count)
        ids, probs = example.laws.ids[-count:], example.laws.probs[-count:]
        shared = np.minimum(np.where(probs > 0, _probs_of(logits, ids), 0), probs).sum(axis=1)
        is_right = (logits.argmax(axis=1) == pieces[-count:]) & example.is_drafted[-count:]
        starts = np.flatnonzero(np.diff(example.tokens[-count:], prepend=-1))
        return np.logical_and.reduceat(is_right, starts), shared.astype(np.float32)


def _probs_of(logits: Floats, ids: npt.NDArray[np.integer[Any]]) -> Floats:
    """Of the pieces ``[count, top]`` in the laws of ``[count, vocab]``."""
    mass = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs: Floats = np.take_along_axis(mass, ids, axis=1) / mass.sum(axis=1, keepdims=True)
    return probs
