"""What a proposer offers in one round."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Draft tokens of one round, in target ids.

    For greedy decoding the tokens alone decide. The walk that made them (trie nodes
    and the drafter's branch laws at each) joins this record with sampling.
    """

    token_ids: tuple[int, ...]
    model_s: float = 0.0
    """Seconds spent in the drafter's forward passes."""

    EMPTY: ClassVar["Proposal"]


Proposal.EMPTY = Proposal(token_ids=())
