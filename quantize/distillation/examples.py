"""Training examples: the teacher's text in the drafter's pieces, and batches of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import full_spellings
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.distillation import PieceLaws, TokenLaws, spelling_paths
from omnidraft_npu.examples import ExampleMaker as PairExampleMaker
from omnidraft_npu.replay import Example as PairExample

from .teacher_text import Response


@dataclass(frozen=True, eq=False, kw_only=True)
class Example(PairExample):
    """One response in pieces; the answer is what is learned."""

    task: str
    is_greedy: bool

    @property
    def num_prompt(self) -> int:
        """Pieces before the answer."""
        return len(self.pieces) - self.num_response


class ExampleMaker:
    """Responses of one target as examples for one drafter."""

    def __init__(self, encoder: PieceEncoder, target: Vocabulary, num_top: int) -> None:
        paths = spelling_paths(full_spellings(encoder, target), target.size)
        self._maker = PairExampleMaker(encoder, target, paths, num_top=num_top)

    def make(self, response: Response, max_pieces: int) -> Example | None:
        """The example of a response, cut after `max_pieces`; None if nothing is left."""
        laws = TokenLaws(
            token_ids=response.token_ids,
            top_ids=response.top_ids,
            probs=np.exp(response.log_probs.astype(np.float32)),
        )
        made = self._maker.make(response.prompt_ids.tolist(), laws, max_pieces=max_pieces)
        if made is None:
            return None
        return Example(task=response.task, is_greedy=response.is_greedy, **vars(made))


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Examples side by side, padded at their ends."""

    pieces: npt.NDArray[np.int64]
    """``[examples, length]``."""
    positions: npt.NDArray[np.int64]
    """``[answer pieces]`` flat index into ``pieces`` of the piece before each learned one."""
    laws: PieceLaws
    """``[answer pieces, top]``."""

    @classmethod
    def of(cls, examples: list[Example]) -> "Batch":
        """One batch of these examples."""
        length = max(len(e.pieces) for e in examples)
        pieces = np.zeros((len(examples), length), np.int64)
        positions: list[Any] = []
        for row, e in enumerate(examples):
            pieces[row, : len(e.pieces)] = e.pieces
            positions.append(row * length + np.arange(e.num_prompt, len(e.pieces)) - 1)
        return cls(
            pieces=pieces,
            positions=np.concatenate(positions),
            laws=PieceLaws(
                ids=np.concatenate([e.laws.ids for e in examples]),
                probs=np.concatenate([e.laws.probs for e in examples]),
            ),
        )


def batches(
    examples: list[Example], max_pieces: int, rng: np.random.Generator
) -> Iterator[list[Example]]:
    """One epoch in random order; each batch holds examples of like lengths.

    A batch is as many examples as fill `max_pieces` with their padding, at least one.
    """
    lengths = np.array([len(e.pieces) for e in examples])
    order = np.argsort(lengths + rng.integers(0, 64, len(lengths)), kind="stable")
    groups: list[list[int]] = [[]]
    longest = 0
    for i in order.tolist():
        longest = max(longest, int(lengths[i]))
        if groups[-1] and longest * (len(groups[-1]) + 1) > max_pieces:
            groups.append([])
            longest = int(lengths[i])
        groups[-1].append(i)
    for g in rng.permutation(len(groups)).tolist():
        yield [examples[i] for i in groups[g]]


def answer_pieces(examples: Iterable[Example]) -> int:
    """Pieces that are learned from."""
    return sum(len(e.pieces) - e.num_prompt for e in examples)
