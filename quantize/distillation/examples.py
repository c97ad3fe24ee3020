"""Training examples: the teacher's text in the drafter's pieces, and batches of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omnidraft_npu.bridge.following import ByteBridge
from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.spelling import end_pieces, full_spellings
from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.distillation import (
    PieceLaws,
    TokenLaws,
    locate_pieces,
    piece_laws,
    spelling_paths,
)

from .teacher_text import Response

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Example:
    """One response in pieces."""

    task: str
    is_greedy: bool
    pieces: Ids
    """``[prompt + answer]``; the answer is what is learned."""
    num_prompt: int
    laws: PieceLaws
    """``[answer, top]``."""
    tokens: Ids
    """``[answer]`` index of the token that each piece begins in."""
    is_drafted: npt.NDArray[np.bool_]
    """``[answer]`` whether the piece lies on the spelling of its token."""


class ExampleMaker:
    """Responses of one target as examples for one drafter."""

    def __init__(self, encoder: PieceEncoder, target: Vocabulary, num_top: int) -> None:
        self._encoder, self._target, self._num_top = encoder, target, num_top
        self._paths = spelling_paths(full_spellings(encoder, target), target.size)
        self._ends = end_pieces(encoder.vocabulary, target)
        self._bridge = ByteBridge(encoder, target)

    def make(self, response: Response, max_pieces: int) -> Example | None:
        """The example of a response, cut after `max_pieces`; None if nothing is left."""
        pieces, starts, tokens, token_starts = self._spell(response.token_ids)
        self._bridge.begin(response.prompt_ids.tolist())
        prompt = np.array(self._bridge.pieces, np.int32)
        room = max_pieces - len(prompt)
        if room < 1 or not len(pieces):
            return None
        owners, depths = locate_pieces(self._paths, tokens, token_starts, pieces, starts)
        laws = TokenLaws(
            token_ids=tokens,
            top_ids=response.top_ids[: len(tokens)],
            probs=np.exp(response.log_probs[: len(tokens)].astype(np.float32)),
        )
        found = piece_laws(laws, self._paths, pieces, owners, depths, num_top=self._num_top)
        return Example(
            task=response.task,
            is_greedy=response.is_greedy,
            pieces=np.concatenate([prompt, pieces[:room]]),
            num_prompt=len(prompt),
            laws=PieceLaws(ids=found.ids[:room], probs=found.probs[:room]),
            tokens=owners[:room],
            is_drafted=depths[:room] >= 0,
        )

    def _spell(self, token_ids: Ids) -> tuple[Ids, Ids, Ids, Ids]:
        """Pieces and their starts, the tokens they spell and their starts; the end is one piece."""
        ids = token_ids.tolist()
        is_end = [i in self._ends for i in ids]
        text = ids[: is_end.index(True)] if True in is_end else ids
        data = [self._target.token_bytes(i) for i in text]
        # A token without bytes in the middle of an answer is left out with all that follows.
        if b"" in data:
            ids = text = text[: data.index(b"")]
        pieces, starts = self._encoder.encode(b"".join(data[: len(text)]))
        lengths = [len(part) for part in data[: len(text)]]
        token_starts = np.cumsum([0, *lengths])
        if len(ids) > len(text):
            pieces = [*pieces, self._ends[ids[len(text)]]]
            starts = [*starts, int(token_starts[-1])]
            text = ids[: len(text) + 1]
        return (
            np.array(pieces, np.int32),
            np.array(starts, np.int32),
            np.array(text, np.int32),
            token_starts[: len(text)].astype(np.int32),
        )


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
