"""What a proposer offers in one round."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

ROOT = 0
"""Node of a trie where every spelling begins."""

STOP = -1
"""Branch of a trie node that ends the token there; the last one of an array of branches."""

Rule = Literal["lossless", "paper"]

Stop = Literal["budget", "cost", "unlikely", "end", "context", "nothing", "off", "trial"]
"""Why drafting ended in a round: as many as allowed; another piece costs more than it promises;
too unlikely that all are accepted, before times are known; nothing may follow, as after an end of
response; no room in the drafter's context; nothing to draft from; drafting cannot pay at all; a
round without drafts, to measure one."""

Ids = npt.NDArray[np.int32]
Probs = npt.NDArray[Any]
"""Probabilities or weights, float32 or float64; the tests' are exact fractions."""


class PieceTrie(Protocol):
    """Target tokens spelled in drafter pieces; node 0 is the root.

    Every node leads to at least one token. What a walk recorded refers to the trie as it
    was in that round, so a trie that learns may change between rounds only.
    """

    @property
    def aliases(self) -> Ids:
        """``[aliases, 2]`` pieces each with the root piece that it stands for."""
        ...

    @property
    def root_tokens(self) -> Ids:
        """``[children of the root]`` preferred target id that ends at each, -1 where none does."""
        ...

    @property
    def root_branches(self) -> npt.NDArray[np.int64]:
        """``[target ids]`` branch at the root of every token, the number of children for one
        without a spelling; ids from there on have none."""
        ...

    def children(self, node: int) -> tuple[Ids, Ids]:
        """Pieces that lead on from a node, rising, and the nodes that they lead to."""
        ...

    def tokens(self, node: int) -> Ids:
        """Target ids that end at a node, the preferred one first."""
        ...

    def subtree_tokens(self, node: int) -> Ids:
        """Target ids whose path goes through a node or ends there."""
        ...

    def branch_masses(self, node: int, weights: Probs) -> Probs:
        """``[children + 1]`` sums of ``[vocab]`` weights over the tokens under each child, then
        over those that end at the node; at the root over those that have no spelling."""
        ...


class BranchLaw(Protocol):
    """What branches were drawn from, at a node and, after a STOP there, at the root."""

    def prob(self, node: int, branch: int) -> Any:
        """Probability of one branch."""
        ...

    def probs(self, node: int) -> Probs:
        """``[children + 1]`` probability of each child, then of STOP (0 at the root)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One branching of a walk through the spelling trie."""

    node: int
    branch: int
    """Index among the node's children, or `STOP`."""
    law: BranchLaw | None = None
    """None: all of it was on `branch`, as in greedy drafting. Asked where a verdict needs it."""

    @cached_property
    def branch_prob(self) -> Any:
        """Probability that `branch` was drawn with."""
        return self.prob(self.branch)

    @cached_property
    def branch_probs(self) -> Probs | None:
        """``[children + 1]`` the law the branch was drawn from: each child, then STOP (0 at the
        root). None: all of it was on `branch`."""
        return None if self.law is None else self.law.probs(self.node)

    def prob(self, branch: int) -> Any:
        """Probability of one branch."""
        return branch == self.branch if self.law is None else self.law.prob(self.node, branch)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Draft tokens of one round, in target ids, and how each was drawn."""

    token_ids: tuple[int, ...]
    walk: tuple[tuple[Visit, ...], ...] = ()
    """Per token the branchings from the root to STOP at its node; a leaf, where nothing
    branches, has none. Of a token without any, or past the end, all the draft law was on
    that token. One more than tokens: a run of pieces that had not become a token."""
    trie: PieceTrie | None = None
    """What the walk's nodes are nodes of; None without a walk."""
    rule: Rule = "lossless"
    """How the walk is verified; `paper` preserves the target's law only approximately."""
    model_s: float = 0.0
    """Seconds spent in the drafter's forward passes."""
    source: str = "model"
    """Which proposer made it: `model`; `lookup` in the context; `past`, in answers of before."""
    stop: Stop = "budget"
    """Why it is not longer."""

    EMPTY: ClassVar["Proposal"]


Proposal.EMPTY = Proposal(token_ids=(), stop="nothing")
