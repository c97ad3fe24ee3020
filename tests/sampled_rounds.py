"""Many rounds of drafting and verification with fixed laws, for tests by chi-square."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from omnidraft_npu.bridge.trie import SpellingTrie
from omnidraft_npu.bridge.walk import TrieWalk
from omnidraft_npu.config import SamplingConfig
from omnidraft_npu.proposal import ROOT, Proposal, Rule
from omnidraft_npu.sampling import Draw, TargetLaw
from omnidraft_npu.token_law import TokenLaw
from omnidraft_npu.verification import verify


class FixedRows:
    """The same law at every place."""

    def __init__(self, law: TokenLaw) -> None:
        self._law = law

    def choice(self, row: int) -> int:
        return int(self._law.dense.argmax())

    def law(self, row: int) -> TokenLaw:
        return self._law


def first_tokens(
    trie: SpellingTrie,
    drafter_logits: Callable[[Sequence[int]], np.ndarray],
    target_logits: np.ndarray,
    *,
    num_pieces: int,
    num_rounds: int,
    k: int = 2,
    sampling: SamplingConfig,
    rule: Rule = "lossless",
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts of the first token that rounds emit, its law, and how many drafts were accepted.

    Args:
        trie: Spellings.
        drafter_logits: From the pieces drawn so far to the next one's ``[pieces]`` logits.
        target_logits: ``[vocab]`` at every place.
        num_pieces: Pieces of the drafter.
        num_rounds: Rounds to draw.
        k: Pieces a round.
        sampling: The target's.
        rule: How proposals are verified.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    draw = Draw(sampling=sampling, rng=rng)
    target_law = TargetLaw(sampling, ()).rows(target_logits[None], ()).law(0)
    rows, walk = FixedRows(target_law), TrieWalk(trie, num_pieces)
    first: Counter[int] = Counter()
    accepted = 0
    for _ in range(num_rounds):
        walk.begin()
        pieces: list[int] = []
        for _ in range(k):
            piece = walk.step(drafter_logits(pieces), draw)
            assert piece is not None
            pieces.append(piece)
        walk.finish()
        # What comes after the first token does not change its law.
        proposal = Proposal(
            token_ids=tuple(walk.token_ids[:1]),
            walk=tuple(walk.visits[:1]),
            trie=trie,
            rule=rule,
        )
        verdict = verify(proposal, rows, rng)
        first[verdict.token_ids[0]] += 1
        accepted += verdict.num_accepted
    law = target_law.dense.astype(np.float64)
    counts = np.zeros(len(law), np.int64)
    counts[list(first)] = list(first.values())
    return counts, law / law.sum(), accepted / num_rounds


def likely_tokens(trie: SpellingTrie, rng: np.random.Generator, count: int) -> np.ndarray:
    """Logits of a target that mostly takes `count` tokens, half of them of several pieces."""
    _, roots = trie.children(ROOT)
    is_root = np.isin(trie.token_nodes, roots)
    logits = np.full(len(trie.token_nodes), -12.0, np.float32)
    for group in (np.flatnonzero(is_root), np.flatnonzero((trie.token_nodes > 0) & ~is_root)):
        chosen = rng.choice(group, count // 2, replace=False)
        logits[chosen] = -1.2 * np.log(rng.permutation(count // 2) + 1)
    logits[trie.token_nodes < 0] = -9.0
    return logits


def noisy_drafter(
    trie: SpellingTrie, target_logits: np.ndarray, num_pieces: int, rng: np.random.Generator
) -> Callable[[Sequence[int]], np.ndarray]:
    """A drafter that follows the target's law through the trie, with noise on every piece."""
    weights = np.exp(target_logits.astype(np.float64))
    noise = rng.gumbel(size=num_pieces)
    cached: dict[tuple[int, ...], np.ndarray] = {}

    def row(path: tuple[int, ...]) -> np.ndarray:
        node = ROOT
        for piece in path:
            children, nodes = trie.children(node)
            at = int(children.searchsorted(piece))
            node = int(nodes[at]) if at < len(children) and children[at] == piece else ROOT
        starts, _ = trie.children(ROOT)
        masses = trie.branch_masses(ROOT, weights)[:-1]
        logits = np.full(num_pieces, -np.inf)
        logits[starts] = np.log(masses / masses.sum() + 1e-9)
        if node != ROOT:
            children, _ = trie.children(node)
            inner = trie.branch_masses(node, weights) / weights[trie.subtree_tokens(node)].sum()
            logits += np.log(inner[-1] + 1e-9)
            logits[children] = np.log(inner[:-1] + 1e-9)
        return (0.8 * logits + 0.5 * noise).astype(np.float32)

    def drafter_logits(pieces: Sequence[int]) -> np.ndarray:
        path = tuple(pieces)
        if path not in cached:
            cached[path] = row(path)
        return cached[path]

    return drafter_logits
