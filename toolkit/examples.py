"""Training examples: what a target wrote, in the drafter's pieces, with its laws before each."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .bridge.following import ByteBridge
from .bridge.pieces import PieceEncoder
from .bridge.spelling import end_pieces
from .bridge.trie import SpellingTrie
from .bridge.vocabulary import Vocabulary
from .distillation import (
    Ids,
    PieceLaws,
    TokenLaws,
    locate_pieces,
    path_lengths,
    piece_laws,
)
from .replay import Example


class ExampleMaker:
    """Answers of one target as examples for one drafter that cuts text differently."""

    def __init__(
        self, encoder: PieceEncoder, target: Vocabulary, paths: Ids, *, num_top: int
    ) -> None:
        """Make examples of `num_top` pieces a law; `paths` are those of every target token."""
        self._encoder, self._target, self._num_top = encoder, target, num_top
        self._paths = paths
        self._lengths = path_lengths(paths)
        self._ends = end_pieces(encoder.vocabulary, target)
        self._bridge = ByteBridge(encoder, target)

    def make(
        self,
        prompt_ids: Sequence[int],
        laws: TokenLaws,
        *,
        max_pieces: int | None = None,
        max_context: int | None = None,
    ) -> Example | None:
        """The example of an answer; None if nothing of it is left.

        Args:
            prompt_ids: Target ids of all that came before the answer.
            laws: The answer and what was said before each token of it.
            max_pieces: Cut after so many, those of the prompt included.
            max_context: Keep so many pieces of the prompt, the last ones.
        """
        pieces, starts, tokens, token_starts = self._spell(laws.token_ids)
        self._bridge.begin(list(prompt_ids))
        context = np.array(self._bridge.pieces, np.int32)
        if max_context is not None:
            context = context[max(0, len(context) - max_context) :]
        room = len(pieces) if max_pieces is None else max_pieces - len(context)
        if room < 1 or not len(pieces):
            return None
        owners, depths = locate_pieces(self._paths, tokens, token_starts, pieces, starts)
        said = TokenLaws(
            token_ids=tokens,
            top_ids=laws.top_ids[: len(tokens)],
            probs=laws.probs[: len(tokens)],
        )
        found = piece_laws(said, self._paths, pieces, owners, depths, num_top=self._num_top)
        return Example(
            pieces=np.concatenate([context, pieces[:room]]),
            laws=PieceLaws(ids=found.ids[:room], probs=found.probs[:room]),
            tokens=owners[:room],
            is_drafted=depths[:room] >= 0,
            is_direct=(depths[:room] == 0) & (self._lengths[tokens[owners[:room]]] == 1),
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


@dataclass(frozen=True, kw_only=True)
class EqualExampleMaker:
    """The same for a drafter with the target's own tokenizer: every token is a piece."""

    num_pieces: int
    """Ids that the drafter has rows for; others are left out."""
    num_top: int

    def make(
        self,
        prompt_ids: Sequence[int],
        laws: TokenLaws,
        *,
        max_context: int | None = None,
    ) -> Example | None:
        """The example of an answer; see `ExampleMaker.make`."""
        prompt = np.array(prompt_ids, np.int32)
        context = prompt[prompt < self.num_pieces]
        if max_context is not None:
            context = context[max(0, len(context) - max_context) :]
        rows = np.flatnonzero(laws.token_ids < self.num_pieces)
        if not len(rows):
            return None
        ids, probs = laws.top_ids[rows], laws.probs[rows]
        probs = np.where(ids < self.num_pieces, probs, 0).astype(np.float32)
        order = np.argsort(-probs, axis=1, kind="stable")[:, : self.num_top]
        probs = np.take_along_axis(probs, order, axis=1)
        ids = np.where(probs > 0, np.take_along_axis(ids, order, axis=1), 0).astype(np.int32)
        is_one = np.ones(len(rows), np.bool_)
        return Example(
            pieces=np.concatenate([context, laws.token_ids[rows]]).astype(np.int32),
            laws=PieceLaws(ids=ids, probs=probs),
            tokens=np.arange(len(rows), dtype=np.int32),
            is_drafted=is_one,
            is_direct=is_one,
        )


def trie_paths(trie: SpellingTrie, *, longest: int = 12) -> Ids:
    """``[target ids, longest]`` pieces of every token, as `spelling_paths` gives them.

    A row of -1 only stands for a token that is not mapped, or has more than `longest` pieces.
    """
    parents = np.zeros(trie.num_nodes, np.int64)
    edges = np.zeros(trie.num_nodes, np.int32)
    parents[trie.child_nodes] = np.repeat(np.arange(trie.num_nodes), np.diff(trie.child_offsets))
    edges[trie.child_nodes] = trie.child_pieces
    nodes = np.maximum(trie.token_nodes, 0).astype(np.int64)
    steps: list[npt.NDArray[np.int32]] = []
    while len(steps) < longest and nodes.any():
        steps.append(np.where(nodes > 0, edges[nodes], -1))
        nodes = parents[nodes]
    backwards = np.stack(steps[::-1] or [np.full(len(nodes), -1, np.int32)], axis=1)
    backwards[nodes > 0] = -1
    # The pieces of a short path stand at the end of its row: those before them go behind.
    order = np.argsort(backwards < 0, axis=1, kind="stable")
    return np.take_along_axis(backwards, order, axis=1).astype(np.int32)


def windows(example: Example, length: int, *, num_context: int) -> Iterator[Example]:
    """An example as rows of at most `length` pieces; every law is in exactly one of them.

    Args:
        example: What is cut, if it must be.
        length: Pieces of a row, at least 2.
        num_context: Pieces that a row has before its first law, at least 1; where there is
            room to spare, more.
    """
    total, first = len(example.pieces), len(example.pieces) - example.num_response
    # Nothing stands before the first piece to predict it from.
    start = max(first, 1)
    while start < total:
        end = min(total, max(0, start - num_context) + length)
        begin = max(0, end - length)
        rows = slice(start - first, end - first)
        yield dataclasses.replace(
            example,
            pieces=example.pieces[begin:end],
            laws=PieceLaws(ids=example.laws.ids[rows], probs=example.laws.probs[rows]),
            tokens=example.tokens[rows],
            is_drafted=example.is_drafted[rows],
            is_direct=example.is_direct[rows],
        )
        start = end
