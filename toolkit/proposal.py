"""What a proposer offers in one round."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

STOP = -1
"""Branch of a trie node that ends the token there."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One branching of a walk through the spelling trie."""

    node: int
    branch: int
    """Index among the node's children, or `STOP`."""
    child_probs: npt.NDArray[np.float32] | None = None
    """``[children]`` the law the branch was drawn from, over the node's children; the rest of
    the mass is on STOP. None: all of it was on `branch`, as in greedy drafting."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Draft tokens of one round, in target ids.

    For greedy decoding the tokens alone decide. The walk says how each was drawn.
    """

    token_ids: tuple[int, ...]
    walk: tuple[tuple[Visit, ...], ...] = ()
    """Per token the branchings from the root to STOP at its node; a leaf, where nothing
    branches, has none. Empty where no trie was used."""
    model_s: float = 0.0
    """Seconds spent in the drafter's forward passes."""
    source: str = "model"
    """Which proposer made it: `model` or `lookup`."""

    EMPTY: ClassVar["Proposal"]


Proposal.EMPTY = Proposal(token_ids=())
