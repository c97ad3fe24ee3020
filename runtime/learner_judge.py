"""How well a drafter with an adapter would have drafted responses that it did not learn from."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnidraft_npu.replay import Example

from .lora_inputs import Tensors
from .model import Model


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

    @property
    def chance(self) -> float:
        """What a drafter may gain or lose by chance alone: two standard errors.

        Of two adapters, one drafts about one token in ten otherwise than the other.
        """
        return 2 * math.sqrt(0.1 / self.num_tokens)


class Judge:
    """Runs the graph that really drafts, in a conversation of its own."""

    def __init__(self, graph: Model) -> None:
        """Judge adapters of this drafter."""
        self._lm = graph.begin(is_exact=False)

    def acceptance(
        self,
        lora: Tensors,
        examples: Iterable[Example],
        pause: Callable[[], None] = lambda: None,
    ) -> Acceptance | None:
        """Of the drafter with this adapter; None where there is no token to judge by.

        Args:
            lora: By graph input.
            examples: Responses.
            pause: Called before each of them.
        """
        right, overlap = [np.zeros(0, np.bool_)], [np.zeros(0, np.float32)]
        for is_right, shared in self.outcomes(lora, examples, pause):
            right.append(is_right)
            overlap.append(shared)
        tokens, pieces = np.concatenate(right), np.concatenate(overlap)
        if not len(tokens):
            return None
        return Acceptance(
            greedy=float(tokens.mean()), sampled=float(pieces.mean()), num_tokens=len(tokens)
        )

    def overlaps(self, lora: Tensors, examples: Iterable[Example]) -> list[npt.NDArray[np.float32]]:
        """``[response]`` overlap of the laws at every piece of each example with a piece before."""
        return [shared for _, shared in self.outcomes(lora, examples)]

    def outcomes(
        self,
        lora: Tensors,
        examples: Iterable[Example],
        pause: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]]:
        """Of each example, ``[tokens]`` whether drafted, and ``[pieces]`` the laws' overlap."""
        self._lm.set_lora(lora)
        for example in examples:
            pause()
            yield self._one(example)

    def _one(self, example: Example) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
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
