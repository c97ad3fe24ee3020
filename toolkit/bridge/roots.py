"""Draws where tokens begin: at the root of a trie, among all pieces that lead on from it."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import SamplingConfig
from ..proposal import ROOT, PieceTrie, Probs, Visit
from ..sampling import Draw, leaves_out, near_weights, to_weights
from ..token_law import AnyIds, TokenLaw
from .spelling import Ids

Logits = npt.NDArray[np.float32]

_LEAST = 1e-5
"""With options that leave tokens out, a piece is not drawn whose share of the likeliest one's
probability is below this."""
_LEAST_OF_REST = 0.01
"""The same, of what top-p leaves out; pieces below it are hardly ever among those that it keeps."""


class Roots:
    """The pieces that begin tokens of one trie: their weights, draws and laws."""

    def __init__(self, trie: PieceTrie, num_pieces: int) -> None:
        """Know the root of `trie`, for logits of `num_pieces` pieces."""
        starts, _ = trie.children(ROOT)
        self.pieces: AnyIds = starts.astype(np.int64)
        """``[children]`` the piece that leads to each, rising."""
        self._branch_of = np.full(num_pieces, -1, np.int64)
        self._branch_of[starts] = np.arange(len(starts))
        aliases = trie.aliases[np.isin(trie.aliases[:, 1], starts)].astype(np.int64)
        self._aliases = aliases[:, 0]
        self._alias_branches = self._branch_of[aliases[:, 1]]
        self._branch_of[self._aliases] = self._alias_branches
        self._groups = {
            branch: np.append(self._aliases[self._alias_branches == branch], self.pieces[branch])
            for branch in set(self._alias_branches.tolist())
        }
        """Pieces of the branches that have more than one."""
        self._is_start = self._branch_of >= 0
        self._others = np.flatnonzero(~self._is_start)

    def branch(self, piece: int) -> int:
        """The branch of a piece, or of the one that it stands for; -1 where there is none."""
        return self._branch_of.item(piece)

    def allowed_only(self, logits: Logits, children: Ids) -> Logits:
        """Logits in which only pieces that begin a token, and children, are not ruled out."""
        allowed = logits.copy()
        allowed[self._others] = -np.inf
        allowed[children] = logits[children]
        return allowed

    def weights(
        self, logits: Logits, children: Ids, sampling: SamplingConfig
    ) -> tuple[TokenLaw, Probs] | None:
        """Weights of the pieces that begin a token and are no children, and of the children.

        None where no piece may be drawn. Lossless whatever is left out of them: that only
        shapes the law that the drafter draws from and reports.

        Args:
            logits: ``[pieces]``.
            children: ``[n]`` rising pieces that lead on from the current node; none at the root.
            sampling: The target's options.
        """
        found = self._weights(logits, children, sampling)
        if _has_weight(*found):
            return found
        # Pieces that may not be drawn are far likelier than all that may.
        logits = self.allowed_only(logits, children)
        if not logits.max(initial=-np.inf) > -np.inf:
            return None
        found = self._weights(logits, children, sampling)
        return found if _has_weight(*found) else None

    def _weights(
        self, logits: Logits, children: Ids, sampling: SamplingConfig
    ) -> tuple[TokenLaw, Probs]:
        if not leaves_out(sampling):
            weights = to_weights(logits, sampling)
            extending = weights[children]
            weights[self._others] = 0
            weights[children] = 0
            return TokenLaw(weights), extending
        least = max(_LEAST, _LEAST_OF_REST * (1 - sampling.top_p))
        bound = logits.max(initial=-np.inf) + sampling.temperature * math.log(least)
        likely = (logits >= bound).nonzero()[0]
        is_start = self._is_start
        were_starts = is_start[children]
        is_start[children] = False
        pieces = likely[is_start[likely]]
        is_start[children] = were_starts
        both = near_weights(logits[np.concatenate((children, pieces))], sampling)
        return TokenLaw(both[len(children) :], pieces, len(logits)), both[: len(children)]

    def draw(self, starting: TokenLaw, draw: Draw) -> Visit:
        """A branch of the root by weights of pieces, which must not all be 0."""
        branch = self.branch(starting.draw(draw.rng))
        total, pieces, groups = starting.total, self.pieces, self._groups

        def share(branch: int) -> Any:
            group = groups.get(branch)
            one = starting.weight(pieces.item(branch)) if group is None else starting.mass(group)
            return one / total

        def law() -> Probs:
            weights = starting.dense
            probs = np.append(weights[pieces], weights.dtype.type(0))
            if groups:
                np.add.at(probs, self._alias_branches, weights[self._aliases])
            probs *= weights.dtype.type(1 / total)
            return probs

        return Visit(node=ROOT, branch=branch, branch_prob=share(branch), law=law, share=share)


def _has_weight(starting: TokenLaw, extending: Probs) -> bool:
    return starting.total > 0 or bool(extending.sum() > 0)
