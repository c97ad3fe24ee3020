"""Decide a proposal: which drafts are kept, and the target token that follows them."""

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .proposal import ROOT, STOP, Ids, PieceTrie, Probs, Proposal, Visit
from .token_law import TokenLaw, sample, total

_MAX_THINNED = 16
"""Draws from the target's law before the sums of all branches are formed after a rejection."""


class TargetRows(Protocol):
    """The target's next token before each draft of a round and after the last."""

    def choice(self, row: int) -> int:
        """The likeliest token; of equal ones the lowest id."""
        ...

    def law(self, row: int) -> TokenLaw:
        """The law of the next token; asked for only where a verdict needs it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one round: the accepted drafts and one token of the target's own."""

    token_ids: tuple[int, ...]
    """Accepted draft tokens, then the correction or bonus unless a stop token cut it off."""
    num_accepted: int
    num_tested: int
    """Draft tokens compared with the target: the accepted ones and a rejected one."""
    is_stopped: bool = False

    def until(self, stop_token_ids: Set[int]) -> "Verdict":
        """The same verdict cut after its first stop token, if it has one."""
        for i, token_id in enumerate(self.token_ids):
            if token_id in stop_token_ids:
                return Verdict(
                    token_ids=self.token_ids[: i + 1],
                    num_accepted=min(self.num_accepted, i + 1),
                    num_tested=min(self.num_tested, i + 1),
                    is_stopped=True,
                )
        return self


def verify(proposal: Proposal, rows: TargetRows, rng: np.random.Generator | None) -> Verdict:
    """Keep the drafts that survive and add one token of the target's own.

    The tokens have the target's law whatever was drafted, unless the proposal's rule is
    `paper`.

    Args:
        proposal: k draft tokens.
        rows: The target's laws, row i before draft token i and row k after the last.
        rng: For the coins and draws; None decides greedily.

    Returns:
        A verdict of ``num_accepted + 1`` tokens.
    """
    emitted: list[int] = []
    k = len(proposal.token_ids)
    for i in range(k + 1):
        token = rows.choice(i) if rng is None else _decide(proposal, i, rows.law(i), rng)
        emitted.append(token)
        if i < k and token != proposal.token_ids[i]:
            return Verdict(token_ids=tuple(emitted), num_accepted=i, num_tested=i + 1)
    return Verdict(token_ids=tuple(emitted), num_accepted=k, num_tested=k)


def _decide(proposal: Proposal, i: int, law: TokenLaw, rng: np.random.Generator) -> int:
    """The token at place i: it has the target's law, and is draft token i as often as can be.

    Where it is the draft token, the next row is the target's law after it, and the round
    goes on; any other ends it.
    """
    visits = proposal.walk[i] if i < len(proposal.walk) else ()
    token_id = proposal.token_ids[i] if i < len(proposal.token_ids) else None
    if visits and proposal.trie is not None and proposal.rule == "lossless":
        return walked_token(visits, proposal.trie, law, rng)
    if token_id is None:
        return law.draw(rng)
    if visits and proposal.trie is not None and visits[0].branch_probs is not None:
        weights = law.dense
        draft = _paper_law(visits, visits[0].branch_probs, proposal.trie, token_id, len(weights))
        return _accepted_or_redrawn(token_id, draft, weights, rng)
    return _other_or_same(token_id, law, rng)


def walked_token(
    visits: tuple[Visit, ...], trie: PieceTrie, law: TokenLaw, rng: np.random.Generator
) -> int:
    """A token with the target's law, from one walk of the drafter through the trie.

    At every node the drafter's branch is accepted with probability
    ``min(1, tau / beta)``, where ``beta`` is the law it was drawn from and ``tau`` the target's
    share of the branch among all tokens under the node; else a branch is drawn from
    the positive part of ``tau - beta``, and a token under it ends the walk. What the walk
    leaves open is drawn from the target's law.

    Args:
        visits: From the root on; the last one may leave the run open.
        trie: What their nodes are nodes of.
        law: The target's.
        rng: For coins and draws.
    """
    mass = law.total
    for visit in visits:
        branch_mass = law.mass(_branch_tokens(trie, visit.node, visit.branch))
        if not rng.random() * (visit.branch_prob * mass) < branch_mass:
            if visit.node == ROOT:
                token_id = _thinned(visit, trie, law, rng)
                if token_id is not None:
                    return token_id
            return _redraw(visit, trie, law, mass, rng)
        mass = branch_mass
    return _draw_among(_branch_tokens(trie, visits[-1].node, visits[-1].branch), law, rng)


def residual(target: Probs, draft: Probs) -> Probs:
    """Weights to draw from after a draft was rejected: what accepting it has not yet covered.

    Args:
        target: ``[n]`` with some sum.
        draft: ``[n]`` with the same sum.

    Returns:
        ``[n]`` ``max(0, target - draft)``; `target` where that is 0 everywhere, when
        only rounding can have rejected.

    Source:
        Leviathan et al. 2023, arXiv:2211.17192, section 2.3.
    """
    excess = np.maximum(target - draft, 0)
    return excess if total(excess) > 0 else target


def _thinned(visit: Visit, trie: PieceTrie, law: TokenLaw, rng: np.random.Generator) -> int | None:
    """What `_redraw` draws at the root, mostly found without the sums of all branches.

    A token from the target's law is kept with probability ``max(0, 1 - beta / tau)`` of its
    branch, which leaves the positive part of ``tau - beta``. None where some were not kept.
    """
    _, nodes = trie.children(ROOT)
    branches = trie.root_branches
    for _ in range(_MAX_THINNED):
        token_id = law.draw(rng)
        if token_id >= len(branches) or branches.item(token_id) == len(nodes):
            return token_id
        branch = branches.item(token_id)
        mass = law.mass(trie.subtree_tokens(int(nodes[branch])))
        if not rng.random() * mass < visit.prob(branch) * law.total:
            return token_id
    return None


def _redraw(
    visit: Visit, trie: PieceTrie, law: TokenLaw, mass: Any, rng: np.random.Generator
) -> int:
    """A token under the node, after its drafted branch was rejected."""
    masses = trie.branch_masses(visit.node, law.dense)
    draft = visit.branch_probs
    if draft is None:
        draft = np.zeros_like(masses)
        draft[visit.branch] = 1
    branch = sample(residual(masses, draft * mass), rng)
    if branch < len(masses) - 1:
        return _draw_among(_branch_tokens(trie, visit.node, branch), law, rng)
    if visit.node != ROOT:
        return _draw_among(trie.tokens(visit.node), law, rng)
    unspelled = law.dense.copy()
    unspelled[trie.subtree_tokens(ROOT)] = 0
    return sample(unspelled, rng)


def _other_or_same(token_id: int, law: TokenLaw, rng: np.random.Generator) -> int:
    """A token with the target's law, by a coin for a certain draft token first."""
    weight = law.weight(token_id)
    if rng.random() * law.total < weight:
        return token_id
    return law.draw_other(token_id, rng)


def _accepted_or_redrawn(
    token_id: int, law: Probs, weights: Probs, rng: np.random.Generator
) -> int:
    """Ordinary rejection sampling of a draft token from its ``[vocab]`` law."""
    mass = total(weights)
    if rng.random() * (law[token_id] * mass) < weights[token_id]:
        return token_id
    return sample(residual(weights, law * mass), rng)


def _paper_law(
    visits: tuple[Visit, ...],
    start_probs: Probs,
    trie: PieceTrie,
    token_id: int,
    vocab_size: int,
) -> Probs:
    """``[vocab]`` what the paper takes for the law of a draft token; it is not, when sampling.

    A token of several pieces has the product of their probabilities, which its first
    piece's own token loses; every other token of one piece has that piece's.

    Source:
        OmniDraft 2025, arXiv:2507.02659, equations 1 and 2.
    """
    start, *others = [visit for visit in visits if visit.branch != STOP]
    tokens = trie.root_tokens
    has_token = tokens >= 0
    law = np.zeros(vocab_size, start_probs.dtype)
    law[tokens[has_token]] = start_probs[:-1][has_token]
    if others:
        product = math.prod((visit.branch_prob for visit in others), start=start.branch_prob)
        if tokens[start.branch] >= 0:
            law[tokens[start.branch]] -= product
        law[token_id] = product
    return law


def _branch_tokens(trie: PieceTrie, node: int, branch: int) -> Ids:
    if branch == STOP:
        return trie.tokens(node)
    _, nodes = trie.children(node)
    return trie.subtree_tokens(int(nodes[branch]))


def _draw_among(token_ids: Ids, law: TokenLaw, rng: np.random.Generator) -> int:
    if len(token_ids) == 1:
        return int(token_ids[0])
    return int(token_ids[sample(law.of(token_ids), rng)])
