"""The walk of one round through the spelling trie, piece by piece."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..proposal import ROOT, STOP, PieceTrie, Visit
from ..sampling import Draw, near_law, to_weights
from ..token_law import TokenLaw
from .roots import PieceLaw, Roots
from .spelling import Ids, Spellings
from .trie import SpellingTrie

Logits = npt.NDArray[np.float32]
_NO_PIECES = np.empty(0, np.int32)
_MAX_DRAWN = 4
"""Pieces that are drawn before those that lead nowhere are ruled out."""


class Walk(Protocol):
    """Turns the drafter's logits into target tokens, one piece at a time."""

    token_ids: list[int]
    """Target tokens finished in this round."""

    @property
    def trie(self) -> PieceTrie | None:
        """What the visits' nodes are nodes of; None where there are no visits."""
        ...

    @property
    def visits(self) -> list[tuple[Visit, ...]]:
        """How each token was drawn, see `Proposal.walk`."""
        ...

    def begin(self) -> None:
        """Start a new round."""
        ...

    def step(self, logits: Logits, draw: Draw | None = None) -> int | None:
        """Draw the next piece from ``[pieces]`` logits; None ends the round."""
        ...

    def finish(self) -> bool:
        """Finish the token that the pieces so far spell; False where they spell none."""
        ...


class PlainWalk:
    """For equal tokenizers: every piece is the target token of the same id.

    Pieces from `num_shared` on, which the target has no row for, are not drawn.
    """

    def __init__(self, num_shared: int) -> None:
        self.trie = SpellingTrie.build(Spellings.of_pieces(num_shared), num_shared)
        self._roots = Roots(self.trie, num_shared)
        self._num_shared = num_shared
        self.begin()

    def begin(self) -> None:
        """Start a new round."""
        self.token_ids: list[int] = []
        self.visits: list[tuple[Visit, ...]] = []

    def step(self, logits: Logits, draw: Draw | None = None) -> int | None:
        """Draw the next token; without `draw` greedily, ties go to the lowest id."""
        shared = logits[: self._num_shared]
        if draw is None:
            visit = Visit(node=ROOT, branch=int(shared.argmax()))
        else:
            law = near_law(shared, draw.sampling)
            if not law.total > 0:
                return None
            branches = PieceLaw(self._roots, law, _NO_PIECES, can_stop=True)
            visit = Visit(node=ROOT, branch=law.draw(draw.rng), law=branches)
        self.token_ids.append(visit.branch)
        self.visits.append((visit,))
        return visit.branch

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
        self._num_pieces = num_pieces
        self.use(trie)

    def use(self, trie: SpellingTrie) -> None:
        """Walk another trie from the next round on; begins that round.

        Raises:
            ValueError: the trie holds a piece that the drafter has no logits for.
        """
        largest = int(trie.child_pieces.max(initial=-1))
        if largest >= self._num_pieces:
            raise ValueError(f"the trie holds piece {largest}, the drafter has {self._num_pieces}")
        self.trie = trie
        self._roots = Roots(trie, self._num_pieces)
        self.begin()

    def begin(self) -> None:
        """Start a new round at the root."""
        self.token_ids: list[int] = []
        self._closed: list[tuple[Visit, ...]] = []
        self._node = ROOT
        self._open: list[Visit] = []

    @property
    def visits(self) -> list[tuple[Visit, ...]]:
        """How each token was drawn, and how the run that is not a token yet."""
        return [*self._closed, tuple(self._open)] if self._open else self._closed

    def step(self, logits: Logits, draw: Draw | None = None) -> int | None:
        """Draw the next piece; without `draw` greedily, ties go to the lowest piece.

        Args:
            logits: ``[pieces]`` of the drafter after the pieces drawn so far.
            draw: How to draw it.

        Returns:
            The piece, to be fed to the drafter; None where no piece is allowed, which
            ends the round.
        """
        visits = self._choose(logits) if draw is None else self._sample(logits, draw)
        if visits is None:
            return None
        if visits[0].branch == STOP:
            self._open.append(visits.pop(0))
            self._close()
        (visit,) = visits
        self._open.append(visit)
        pieces, nodes = self.trie.children(visit.node)
        self._node = int(nodes[visit.branch])
        if not len(self.trie.children(self._node)[0]):
            self._close()
        return int(pieces[visit.branch])

    def finish(self) -> bool:
        """Stop at the current node; whether it holds a token, or the run stays open.

        STOP is certain then, a lawful draft law: the budget decided, not the drafter. An open
        run that was drawn greedily is cut into shorter tokens, as far as it can be.
        """
        if self._node == ROOT:
            return True
        has_token = len(self.trie.tokens(self._node)) > 0
        if has_token:
            self._open.append(Visit(node=self._node, branch=STOP))
            self._close()
        elif all(visit.branch_probs is None for visit in self._open):
            self._cut_open_run()
        return has_token

    def _cut_open_run(self) -> None:
        """From the left, always the longest token that the pieces spell."""
        pieces = [int(self.trie.children(v.node)[0][v.branch]) for v in self._open]
        self._open = []
        while pieces:
            node, longest = ROOT, (0, ROOT)
            for i, piece in enumerate(pieces):
                branch = self._branch(node, piece)
                if branch is None:
                    break
                node = int(self.trie.children(node)[1][branch])
                if len(self.trie.tokens(node)):
                    longest = (i + 1, node)
            length, self._node = longest
            if not length:
                break
            self._close()
            pieces = pieces[length:]

    def _close(self) -> None:
        self.token_ids.append(int(self.trie.tokens(self._node)[0]))
        self._closed.append(tuple(self._open))
        self._node, self._open = ROOT, []

    def _sample(self, logits: Logits, draw: Draw) -> list[Visit] | None:
        """A branch of the current node, and after STOP one of the root; None without any.

        STOP has the mass of all pieces that are not children. The piece after it has the
        same law without the children.
        """
        if self._node != ROOT and not len(self.trie.tokens(self._node)):
            children, _ = self.trie.children(self._node)
            weights = to_weights(logits[children], draw.sampling)
            return self._drawn(TokenLaw(weights, children, len(logits)), draw, can_stop=False)
        law = near_law(logits, draw.sampling)
        for _ in range(_MAX_DRAWN):
            visits = self._drawn(law, draw)
            if visits is not None:
                return visits
        # Pieces that may not be drawn are far likelier than all that may.
        allowed = self._roots.allowed_only(logits, self._children)
        if not allowed.max(initial=-np.inf) > -np.inf:
            return None
        return self._drawn(near_law(allowed, draw.sampling), draw)

    def _drawn(self, law: TokenLaw, draw: Draw, *, can_stop: bool = True) -> list[Visit] | None:
        """The branches to a piece of this law; None where it leads nowhere, or nothing is left."""
        if not law.total > 0:
            return None
        branches = PieceLaw(self._roots, law, self._children, can_stop=can_stop)
        return self._visits_to(law.draw(draw.rng), branches)

    @property
    def _children(self) -> Ids:
        """Pieces that lead on from the current node; none at the root, where all begin a token."""
        return _NO_PIECES if self._node == ROOT else self.trie.children(self._node)[0]

    def _choose(self, logits: Logits) -> list[Visit] | None:
        """The branches of the most likely allowed piece."""
        node, trie = self._node, self.trie
        if node != ROOT and not len(trie.tokens(node)):
            children, _ = trie.children(node)
            return [Visit(node=node, branch=int(logits[children].argmax()))]
        # Mostly the best piece of all is allowed, and masking costs a pass over the vocabulary.
        visits = self._visits_to(int(logits.argmax()))
        if visits is None:
            allowed = self._roots.allowed_only(logits, self._children)
            visits = self._visits_to(int(allowed.argmax()))
        return visits

    def _visits_to(self, piece: int, law: PieceLaw | None = None) -> list[Visit] | None:
        """The branches to what a piece leads to where a token ends or begins; None if nothing."""
        start = self._roots.branch(piece)
        if start >= 0:
            piece = self._roots.pieces.item(start)
        if self._node == ROOT:
            return [Visit(node=ROOT, branch=start, law=law)] if start >= 0 else None
        branch = self._branch(self._node, piece)
        if branch is not None:
            return [Visit(node=self._node, branch=branch, law=law)]
        if start < 0:
            return None
        stop = Visit(node=self._node, branch=STOP, law=law)
        return [stop, Visit(node=ROOT, branch=start, law=law)]

    def _branch(self, node: int, piece: int) -> int | None:
        """Index of a piece among a node's children, None where it is not one."""
        pieces, _ = self.trie.children(node)
        i = int(pieces.searchsorted(pieces.dtype.type(piece)))  # of another type it is copied
        return i if i < len(pieces) and pieces[i] == piece else None
