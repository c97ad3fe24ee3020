"""The walk of one round through the spelling trie, piece by piece."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..proposal import STOP, Visit
from .trie import ROOT, SpellingTrie

Logits = npt.NDArray[np.float32]


class Walk(Protocol):
    """Turns the drafter's logits into target tokens, one piece at a time."""

    token_ids: list[int]
    """Target tokens finished in this round."""
    visits: list[tuple[Visit, ...]]
    """How each was drawn, see `Proposal.walk`."""

    def begin(self) -> None:
        """Start a new round."""
        ...

    def step(self, logits: Logits) -> int | None:
        """Draw the next piece from ``[pieces]`` logits; None ends the round."""
        ...

    def finish(self) -> bool:
        """Finish the token that the pieces so far spell; False where they spell none."""
        ...


class PlainWalk:
    """For equal tokenizers: every piece is the target token of the same id.

    Greedy. Pieces from `num_shared` on, which the target has no row for, are not drawn.
    """

    def __init__(self, num_shared: int) -> None:
        self._num_shared = num_shared
        self.begin()

    def begin(self) -> None:
        """Start a new round."""
        self.token_ids: list[int] = []
        self.visits: list[tuple[Visit, ...]] = []

    def step(self, logits: Logits) -> int | None:
        """Draw the next token greedily; ties go to the lowest id."""
        piece = int(logits[: self._num_shared].argmax())
        self.token_ids.append(piece)
        return piece

    def finish(self) -> bool:
        """Nothing is ever unfinished."""
        return True


class TrieWalk:
    """Draws drafter pieces so that every one spells target tokens, and collects those tokens.

    At a node the drafter chooses among its children and, where a token ends, the root's
    children: a child extends the run, another piece stops it and begins the next token.
    """

    def __init__(self, trie: SpellingTrie, num_pieces: int) -> None:
        """Walk `trie` with a drafter that gives logits for `num_pieces` pieces.

        Raises:
            ValueError: the trie holds a piece that the drafter has no logits for.
        """
        largest = int(trie.child_pieces.max(initial=-1))
        if largest >= num_pieces:
            raise ValueError(f"the trie holds piece {largest}, the drafter has {num_pieces}")
        self._trie = trie
        self._aliases: dict[int, int] = dict(trie.aliases.tolist())
        self._scratch = np.empty(num_pieces, np.float32)
        self._root_mask = np.full(num_pieces, -np.inf, np.float32)
        self._root_mask[trie.children(ROOT)[0]] = 0.0
        self._root_mask[[*self._aliases]] = 0.0
        self.begin()

    def begin(self) -> None:
        """Start a new round at the root."""
        self.token_ids: list[int] = []
        self.visits: list[tuple[Visit, ...]] = []
        self._node = ROOT
        self._open: list[Visit] = []

    def step(self, logits: Logits) -> int | None:
        """Draw the next piece greedily; ties go to the lowest piece.

        Args:
            logits: ``[pieces]`` of the drafter after the pieces drawn so far.

        Returns:
            The piece, to be fed to the drafter; None where no piece is allowed, which
            ends the round.
        """
        node = self._node
        piece = self._choose(logits, node)
        branch = self._branch(node, piece)
        if branch is None and node != ROOT:
            start = self._branch(ROOT, piece)
            if start is None or not self.finish():
                return None
            node, branch = ROOT, start
        if branch is None:
            return None
        self._open.append(Visit(node=node, branch=branch))
        _, nodes = self._trie.children(node)
        self._node = int(nodes[branch])
        if not len(self._trie.children(self._node)[0]):
            self._close()
        return piece

    def finish(self) -> bool:
        """Stop at the current node; whether it holds a token, or the run is dropped.

        STOP is certain then, a lawful draft law: the budget decided, not the drafter.
        """
        if self._node == ROOT:
            return True
        has_token = len(self._trie.tokens(self._node)) > 0
        if has_token:
            self._open.append(Visit(node=self._node, branch=STOP))
            self._close()
        return has_token

    def _close(self) -> None:
        self.token_ids.append(int(self._trie.tokens(self._node)[0]))
        self.visits.append(tuple(self._open))
        self._node, self._open = ROOT, []

    def _choose(self, logits: Logits, node: int) -> int:
        """The most likely allowed piece."""
        trie = self._trie
        children, _ = trie.children(node)
        if node != ROOT and not len(trie.tokens(node)):
            return int(children[logits[children].argmax()])
        # Mostly the best piece of all is allowed, and masking costs a pass over the vocabulary.
        best = self._resolve(int(logits.argmax()))
        if self._branch(node, best) is not None or self._branch(ROOT, best) is not None:
            return best
        masked = np.add(logits, self._root_mask, out=self._scratch)
        if node != ROOT:
            masked[children] = logits[children]
        return self._resolve(int(masked.argmax()))

    def _resolve(self, piece: int) -> int:
        return self._aliases.get(piece, piece)

    def _branch(self, node: int, piece: int) -> int | None:
        """Index of a piece among a node's children, None where it is not one."""
        pieces, _ = self._trie.children(node)
        i = int(pieces.searchsorted(piece))
        return i if i < len(pieces) and pieces[i] == piece else None
