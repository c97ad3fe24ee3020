"""What begins a token of a trie, and the laws of branches that follow from a piece's law."""

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..proposal import ROOT, STOP, PieceTrie, Probs
from ..token_law import AnyIds, TokenLaw, total
from .spelling import Ids

Logits = npt.NDArray[np.float32]


class Roots:
    """The pieces that begin tokens of one trie, and the branches that they lead to."""

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
        self.shared_branches = frozenset(self._groups)
        self._others = np.flatnonzero(self._branch_of < 0)

    def branch(self, piece: int) -> int:
        """The branch of a piece, or of the one that it stands for; -1 where there is none."""
        return self._branch_of.item(piece)

    def allowed_only(self, logits: Logits, children: Ids) -> Logits:
        """Logits in which only pieces that begin a token, and children, are not ruled out."""
        allowed = logits.copy()
        allowed[self._others] = -np.inf
        allowed[children] = logits[children]
        return allowed

    def starting_mass(self, law: TokenLaw) -> Any:
        """The sum of the weights of all pieces that begin a token."""
        ids = law.ids
        others = self._others if ids is None else self._branch_of[ids] < 0
        return law.total - total(law.weights[others])

    def mass(self, law: TokenLaw, branch: int) -> Any:
        """The sum of the weights of all pieces that lead to a branch of the root."""
        group = self._groups.get(branch)
        return law.weight(self.pieces.item(branch)) if group is None else law.mass(group)

    def masses(self, law: TokenLaw) -> Probs:
        """``[children of the root + 1]`` the same for each branch, and 0 for STOP."""
        weights = law.dense
        masses = np.append(weights[self.pieces], weights.dtype.type(0))
        if self._groups:
            np.add.at(masses, self._alias_branches, weights[self._aliases])
        return masses

    def branches(self, pieces: AnyIds) -> npt.NDArray[np.int64]:
        """The branch of each piece, see `branch`."""
        return self._branch_of[pieces]


class PieceLaw:
    """The laws of branches that follow from the law of the next piece.

    At a node each child has what leads to it, and STOP that of all other pieces that begin
    a token. The piece after STOP has the same law without the children.
    """

    def __init__(self, roots: Roots, law: TokenLaw, children: Ids, *, can_stop: bool) -> None:
        """Know what branches are made of.

        Args:
            roots: Where STOP leads to.
            law: Of pieces; those that lead nowhere were not drawn, or drawn again.
            children: ``[n]`` pieces that lead on from the node; none at the root.
            can_stop: Whether a token may end at the node; at the root.
        """
        self._roots = roots
        self._law = law
        self._children = children
        self._can_stop = can_stop

    def prob(self, node: int, branch: int) -> Any:
        """Probability of one branch."""
        if node == ROOT:
            if branch in self._extending_starts:
                return 0.0
            return self._roots.mass(self._law, branch) / self._stop
        mass = self._stop if branch == STOP else self._extending.item(branch)
        return mass / self._whole

    def probs(self, node: int) -> Probs:
        """``[children + 1]`` probability of each child, then of STOP (0 at the root)."""
        if node == ROOT:
            masses, whole = self._roots.masses(self._law), self._stop
            masses[self._extending_starts] = 0
        else:
            number = self._extending.dtype.type
            masses, whole = np.append(self._extending, number(self._stop)), self._whole
        probs: Probs = masses * masses.dtype.type(1 / whole)
        return probs

    @cached_property
    def _extending_starts(self) -> list[int]:
        """Branches of the root that children of the node take the place of."""
        branches = self._roots.branches(self._children)
        found: list[int] = branches[branches >= 0].tolist()
        return found

    @cached_property
    def _extending(self) -> Probs:
        """``[children]`` the mass of each."""
        masses = self._law.of(self._children)
        for branch in self._roots.shared_branches.intersection(self._extending_starts):
            child = self._children.searchsorted(self._roots.pieces[branch])
            masses[child] = self._roots.mass(self._law, branch)
        return masses

    @cached_property
    def _stop(self) -> Any:
        """The mass of STOP; at the root of all branches."""
        if not self._can_stop:
            return 0
        mass = self._roots.starting_mass(self._law)
        for branch in self._extending_starts:
            mass -= self._roots.mass(self._law, branch)
        return mass

    @cached_property
    def _whole(self) -> Any:
        return self._stop + total(self._extending)
