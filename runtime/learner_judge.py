"""How well a drafter with an adapter would have drafted responses that it did not learn from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnidraft_npu.replay import Example

from .learner_adapter import Adapter
from .lora_inputs import Tensors
from .model import Model

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

    def _one(self, example: Example) -> Drafted:
        lm = self._lm
        lm.reset()
        pieces = example.pieces[-lm.context_length :].tolist()
        count = min(example.num_response, len(pieces) - 1)
        if count < 1:
            return np.zeros(0, np.bool_), np.zeros(0, np.float32)
        first = len(pieces) - count
        lm.prefill(pieces[: first - 1])
        logits = lm.score(pieces[first - 1 : -1])
        ids, probs = example.laws.ids[-count:], example.laws.probs[-count:]
        mass = np.exp(logits - logits.max(axis=1, keepdims=True))
        drafted = np.take_along_axis(mass, ids, axis=1) / mass.sum(axis=1, keepdims=True)
        shared = np.minimum(np.where(probs > 0, drafted, 0), probs).sum(axis=1)
        is_right = (logits.argmax(axis=1) == pieces[first:]) & example.is_drafted[-count:]
        starts = np.flatnonzero(np.diff(example.tokens[-count:], prepend=-1))
        return np.logical_and.reduceat(is_right, starts), shared.astype(np.float32)
