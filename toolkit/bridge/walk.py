"""The walk of one round through the spelling trie, piece by piece."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..proposal import ROOT, STOP, PieceTrie, Probs, Visit
from ..sampling import Draw, to_weights
from ..token_law import AnyIds, Sampler, total
from .spelling import Ids, Spellings
from .trie import SpellingTrie

Logits = npt.NDArray[np.float32]
_NO_PIECES = np.empty(0, np.int32)
_LEAST = 1e-5
"""Share of the likeliest piece's probability below which a piece is not drawn."""
_LEAST_OF_REST = 0.01
"""The same, of what top-p leaves out; pieces below it are hardly ever among those that it keeps."""


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
            ids = _likely(shared, draw)
            weights = to_weights(shared[ids], draw.sampling)
            drawn = _draw_start(ids, weights, np.arange(len(shared)), {}, draw)
            if drawn is None:
                return None
            visit = drawn
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
        pieces, _ = trie.children(ROOT)
        largest = int(trie.child_pieces.max(initial=-1))
        if largest >= self._num_pieces:
            raise ValueError(f"the trie holds piece {largest}, the drafter has {self._num_pieces}")
        self.trie = trie
        aliases = trie.aliases[np.isin(trie.aliases[:, 1], pieces)]
        self._aliases: dict[int, int] = dict(aliases.tolist())
        self._is_start = np.zeros(self._num_pieces, np.bool_)
        """Whether a piece begins a token, or stands for one that does."""
        self._is_start[pieces] = self._is_start[[*self._aliases]] = True
        self._others = np.flatnonzero(~self._is_start)
        self._scratch = np.empty(self._num_pieces, np.float32)
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
        node = self._node
        children = self.trie.children(node)[0] if node != ROOT else _NO_PIECES
        if node != ROOT and not len(self.trie.tokens(node)):
            weights = to_weights(logits[children], draw.sampling)
            visit = _draw_branch(node, weights, 0, draw)
            return None if visit is None else [visit]
        starts = self._likely_starts(logits, children, draw)
        weights = to_weights(logits[np.concatenate((children, starts))], draw.sampling)
        extending, starting = weights[: len(children)], weights[len(children) :]
        visits: list[Visit] = []
        if node != ROOT:
            visit = _draw_branch(node, extending, total(starting), draw)
            if visit is None or visit.branch != STOP:
                return None if visit is None else [visit]
            visits.append(visit)
        visit = _draw_start(starts, starting, self.trie.children(ROOT)[0], self._aliases, draw)
        return None if visit is None else [*visits, visit]

    def _likely_starts(self, logits: Logits, children: Ids, draw: Draw) -> AnyIds:
        """Pieces that begin a token and are not far less likely than the likeliest one.

        Where another piece is much likelier, it is not looked at for what is likely. A
        child of the current node begins no token.
        """
        is_start = self._is_start
        were_starts = is_start[children]
        is_start[children] = False
        pieces = _likely(logits, draw)
        starts = pieces[is_start[pieces]]
        if not len(starts) or logits[starts].max() < logits[pieces].max() + _span(draw) / 2:
            allowed = is_start.nonzero()[0]
            starts = allowed[_likely(logits[allowed], draw)]
        is_start[children] = were_starts
        return starts

    def _choose(self, logits: Logits) -> list[Visit] | None:
        """The branches of the most likely allowed piece."""
        node = self._node
        piece = self._likeliest(logits, node)
        branch = self._branch(node, piece)
        if branch is not None:
            return [Visit(node=node, branch=branch)]
        start = self._branch(ROOT, piece)
        if node == ROOT or start is None or not len(self.trie.tokens(node)):
            return None
        return [Visit(node=node, branch=STOP), Visit(node=ROOT, branch=start)]

    def _likeliest(self, logits: Logits, node: int) -> int:
        trie = self.trie
        children, _ = trie.children(node)
        if node != ROOT and not len(trie.tokens(node)):
            return int(children[logits[children].argmax()])
        # Mostly the best piece of all is allowed, and masking costs a pass over the vocabulary.
        best = self._resolve(int(logits.argmax()))
        if self._branch(node, best) is not None or self._branch(ROOT, best) is not None:
            return best
        masked = self._scratch
        np.copyto(masked, logits)
        masked[self._others] = -np.inf
        if node != ROOT:
            masked[children] = logits[children]
        return self._resolve(int(masked.argmax()))

    def _resolve(self, piece: int) -> int:
        return self._aliases.get(piece, piece)

    def _branch(self, node: int, piece: int) -> int | None:
        """Index of a piece among a node's children, None where it is not one."""
        pieces, _ = self.trie.children(node)
        i = int(pieces.searchsorted(pieces.dtype.type(piece)))  # of another type it is copied
        return i if i < len(pieces) and pieces[i] == piece else None


def _likely(logits: Logits, draw: Draw) -> AnyIds:
    """Indices of the logits that may be drawn; none where they are not numbers."""
    likely: AnyIds = (logits >= logits.max(initial=-np.inf) + _span(draw)).nonzero()[0]
    return likely


def _span(draw: Draw) -> float:
    """How far below the largest logit one may be drawn, as a negative number.

    Lossless for any span: it only shapes the law that the drafter draws from and reports.
    """
    sampling = draw.sampling
    least = max(_LEAST, _LEAST_OF_REST * (1 - sampling.top_p))
    return sampling.temperature * math.log(least)


def _draw_start(
    pieces: AnyIds, weights: Probs, starts: AnyIds, aliases: Mapping[int, int], draw: Draw
) -> Visit | None:
    """A branch of the root, by the weights of the pieces that may be drawn; None of all 0.

    Args:
        pieces: ``[n]`` rising.
        weights: ``[n]``.
        starts: ``[children of the root]`` the piece that leads to each, rising.
        aliases: Pieces with those of `starts` that they stand for.
        draw: How to draw.
    """
    sampler = Sampler(weights)
    if not sampler.total > 0:
        return None
    at = sampler.draw(draw.rng)
    piece = aliases.get(int(pieces[at]), int(pieces[at]))
    number = weights.dtype.type
    scale = 1 / sampler.total

    def law() -> Probs:
        probs = np.zeros(len(starts) + 1, weights.dtype)
        meant = np.array([aliases.get(i, i) for i in pieces.tolist()]) if aliases else pieces
        np.add.at(probs, starts.searchsorted(meant), weights)
        probs *= number(scale)
        return probs

    same = [at]
    if aliases:
        others = {piece, *(alias for alias, start in aliases.items() if start == piece)}
        same = np.flatnonzero(np.isin(pieces, list(others))).tolist()
    return Visit(
        node=ROOT,
        branch=int(starts.searchsorted(starts.dtype.type(piece))),
        branch_prob=total(weights[same]) * scale,
        law=law,
    )


def _draw_branch(node: int, weights: Probs, stop: Any, draw: Draw) -> Visit | None:
    """One of a node's children by their weights, or STOP by its own; None where all are 0."""
    number = weights.dtype.type
    law = np.append(weights, number(stop))
    sampler = Sampler(law)
    if not sampler.total > 0:
        return None
    branch = sampler.draw(draw.rng)
    law *= number(1 / sampler.total)
    return Visit(
        node=node,
        branch=branch if branch < len(weights) else STOP,
        branch_prob=law[branch],
        law=lambda: law,
    )
