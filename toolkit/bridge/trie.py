"""The spelling trie: all spellings in flat arrays, numbered so that a subtree is a range."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..array_files import map_int32
from ..documents import shown_text, shown_value
from ..errors import BundleError
from ..files import write_safetensors
from ..proposal import ROOT, Probs
from ..token_law import sum_type, total
from .spelling import Ids, Spellings

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class SpellingTrie:
    """Trie over drafter pieces whose nodes know the target tokens that end there.

    Nodes are in depth-first order, children by rising piece, tokens by node. So the
    subtree of node v is ``v .. subtree_ends[v] - 1``, its tokens are one slice of
    `token_ids`, and the groups of tokens under the root's children are consecutive
    slices: a target law is summed over any branches with one gather and one reduction.
    """

    child_offsets: Ids
    """``[nodes + 1]``; node v has children ``child_offsets[v] .. child_offsets[v + 1] - 1``."""
    child_pieces: Ids
    """``[nodes - 1]`` piece that leads to each child."""
    child_nodes: Ids
    """``[nodes - 1]`` node of each child."""
    subtree_ends: Ids
    """``[nodes]`` first node after the subtree."""
    token_offsets: Ids
    """``[nodes + 1]``; tokens ``token_ids[token_offsets[v]:token_offsets[v + 1]]`` end at v."""
    token_ids: Ids
    """``[mapped]`` target ids by node, the preferred one of equal tokens first."""
    token_nodes: Ids
    """``[target ids]`` node where each token ends, -1 for an unmapped one."""
    aliases: Ids
    """``[aliases, 2]`` see `Spellings.aliases`."""

    @classmethod
    def build(cls, spellings: Spellings, num_targets: int) -> "SpellingTrie":
        """The trie of these spellings, for a target of `num_targets` ids.

        Level by level: the paths of one length are grouped by parent and piece at once.
        """
        offsets, pieces = spellings.offsets, spellings.pieces.astype(np.int64)
        lengths = np.diff(offsets)
        ends = np.zeros(len(lengths), np.int64)
        active = np.arange(len(lengths))
        parents, edges = [np.array([-1])], [np.array([-1])]
        num_nodes, levels = 1, [0, 1]
        for depth in range(int(lengths.max(initial=0))):
            active = active[lengths[active] > depth]
            keys = ends[active] << 32 | pieces[offsets[active] + depth]
            groups, inverse = np.unique(keys, return_inverse=True)
            parents.append(groups >> 32)
            edges.append(groups & 0xFFFFFFFF)
            ends[active] = num_nodes + inverse
            num_nodes += len(groups)
            levels.append(num_nodes)
        parent, edge = np.concatenate(parents), np.concatenate(edges)
        order, sizes = _depth_first(parent, levels)

        by_parent = np.lexsort((edge[1:], order[parent[1:]])) + 1
        subtree_ends = np.empty(num_nodes, np.int32)
        subtree_ends[order] = order + sizes
        nodes = order[ends]
        token_nodes = np.full(num_targets, -1, np.int32)
        token_nodes[spellings.token_ids] = nodes
        return cls(
            child_offsets=_starts(order[parent[1:]], num_nodes),
            child_pieces=edge[by_parent].astype(np.int32),
            child_nodes=order[by_parent].astype(np.int32),
            subtree_ends=subtree_ends,
            token_offsets=_starts(nodes, num_nodes),
            token_ids=spellings.token_ids[np.argsort(nodes, kind="stable")],
            token_nodes=token_nodes,
            aliases=spellings.aliases,
        )

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.subtree_ends)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))

    def children(self, node: int) -> tuple[Ids, Ids]:
        """Pieces that lead on from a node, rising, and the nodes that they lead to."""
        start, end = self.child_offsets[node], self.child_offsets[node + 1]
        return self.child_pieces[start:end], self.child_nodes[start:end]

    def tokens(self, node: int) -> Ids:
        """Target ids that end at a node, the preferred one first; empty for the root."""
        return self.token_ids[self.token_offsets[node] : self.token_offsets[node + 1]]

    def subtree_tokens(self, node: int) -> Ids:
        """Target ids whose path goes through a node (``T_v``)."""
        start, end = self.token_offsets[node], self.token_offsets[self.subtree_ends[node]]
        return self.token_ids[start:end]

    def branch_masses(self, node: int, weights: Probs) -> Probs:
        """``[children + 1]`` sums of ``[vocab]`` weights over the tokens under each child, then
        over those that end at the node; at the root over those that have no spelling."""
        if node == ROOT and weights.dtype != object:
            branches, num_branches = self.root_branches, len(self.children(ROOT)[0]) + 1
            masses = np.bincount(branches, weights[: len(branches)], num_branches)
            masses[-1] += total(weights[len(branches) :])
            return masses
        masses = self._child_masses(node, weights)
        own = total(weights) - total(masses) if node == ROOT else total(weights[self.tokens(node)])
        return np.append(masses, own)

    def _child_masses(self, node: int, weights: Probs) -> Probs:
        """The groups are consecutive: one gather and one reduction."""
        _, nodes = self.children(node)
        if not len(nodes):
            return weights[:0]
        first = self.token_offsets[nodes[0]]
        gathered = weights[self.token_ids[first : self.token_offsets[self.subtree_ends[node]]]]
        return np.add.reduceat(gathered, self.token_offsets[nodes] - first, dtype=sum_type(weights))

    @cached_property
    def root_tokens(self) -> Ids:
        """``[children of the root]`` preferred target id that ends at each, -1 where none does."""
        _, nodes = self.children(ROOT)
        starts = self.token_offsets[nodes]
        return np.where(starts < self.token_offsets[nodes + 1], self.token_ids[starts], -1)

    @cached_property
    def root_branches(self) -> npt.NDArray[np.int64]:
        """``[target ids]`` branch at the root of every token, the number of children for one
        without a spelling."""
        _, nodes = self.children(ROOT)
        branches = np.full(len(self.token_nodes), len(nodes), np.int64)
        sizes = self.token_offsets[self.subtree_ends[nodes]] - self.token_offsets[nodes]
        branches[self.token_ids] = np.repeat(np.arange(len(nodes)), sizes)
        return branches

    def save(self, path: Path, *, drafter_sha256: str, target_sha256: str) -> None:
        """Write one safetensors file, atomically, marked with both tokenizers' content hashes."""
        arrays = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        metadata = {
            "format_version": str(FORMAT_VERSION),
            "drafter_tokenizer_sha256": drafter_sha256,
            "target_tokenizer_sha256": target_sha256,
        }
        write_safetensors(path, arrays, metadata)

    @classmethod
    def load(cls, path: Path, *, drafter_sha256: str, target_sha256: str) -> "SpellingTrie":
        """A saved trie, memory-mapped.

        Raises:
            BundleError: the file is damaged, of a newer format or made for other tokenizers.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        arrays, metadata = map_int32(path, names, advice="export the bundle again")
        if metadata.get("format_version") != str(FORMAT_VERSION):
            raise BundleError(
                f"{path.name} has format version {shown_value(metadata.get('format_version'))}, "
                f"this tool reads {FORMAT_VERSION}: export the bundle again"
            )
        for key, expected in (
            ("drafter_tokenizer_sha256", drafter_sha256),
            ("target_tokenizer_sha256", target_sha256),
        ):
            if metadata.get(key) != expected:
                raise BundleError(
                    f"{path.name} was made for a {key.replace('_sha256', '').replace('_', ' ')} "
                    f"with sha256 {shown_text(str(metadata.get(key)))}, this one has {expected}: "
                    "export the bundle again"
                )
        trie = cls(**arrays)
        if not trie._is_whole():
            raise BundleError(f"{path.name} is damaged: export the bundle again")
        return trie

    def check_sizes(self, *, num_pieces: int, num_targets: int) -> None:
        """Pass if the trie is for vocabularies of these sizes.

        Raises:
            BundleError: it holds a piece or a token past them, or not every token.
        """
        largest = max(self.child_pieces.max(initial=-1), self.aliases.max(initial=-1))
        if largest >= num_pieces or len(self.token_nodes) != num_targets:
            raise BundleError(
                f"the spellings are for other models: they have the piece {largest} and "
                f"{len(self.token_nodes)} tokens, the drafter has {num_pieces} pieces, the target "
                f"{num_targets} tokens: export the bundle again"
            )

    def _is_whole(self) -> bool:
        """Whether the arrays are those of a trie; every index in them can then be followed."""
        nodes, tokens = len(self.subtree_ends), len(self.token_ids)
        shapes = {
            "child_offsets": (nodes + 1,),
            "child_pieces": (nodes - 1,),
            "child_nodes": (nodes - 1,),
            "subtree_ends": (nodes,),
            "token_offsets": (nodes + 1,),
            "token_ids": (tokens,),
            "token_nodes": (len(self.token_nodes),),
            "aliases": (len(self.aliases), 2),
        }
        return (
            nodes > 0
            and all(getattr(self, name).shape == shape for name, shape in shapes.items())
            and _are_offsets(self.child_offsets, nodes - 1)
            and _are_offsets(self.token_offsets, tokens)
            and self._is_depth_first()
            and self._has_its_tokens()
            and self.aliases.min(initial=0) >= 0
        )

    def _is_depth_first(self) -> bool:
        """Whether children follow their parents, and fill their subtrees, by rising piece."""
        counts = np.diff(self.child_offsets)
        parents = np.repeat(np.arange(self.num_nodes), counts)
        firsts, lasts = self.child_offsets[:-1][counts > 0], self.child_offsets[1:][counts > 0] - 1
        children, ends = self.child_nodes, self.subtree_ends
        if children.min(initial=1) < 1 or children.max(initial=0) >= self.num_nodes:
            return False
        is_first = np.zeros(len(children), np.bool_)
        is_first[firsts] = True
        before = ends[np.roll(children, 1)]
        inner = np.flatnonzero(counts > 0)
        return bool(
            ends[0] == self.num_nodes
            and np.array_equal(children, np.where(is_first, parents + 1, before))
            and np.array_equal(ends[children[lasts]], ends[inner])
            and np.array_equal(ends[counts == 0], np.flatnonzero(counts == 0) + 1)
            and (is_first[1:] | (self.child_pieces[1:] > self.child_pieces[:-1])).all()
            and self.child_pieces.min(initial=0) >= 0
        )

    def _has_its_tokens(self) -> bool:
        """Whether every token ends where its node says, and every leaf has one."""
        counts, ids = np.diff(self.token_offsets), self.token_ids
        if ids.min(initial=0) < 0 or ids.max(initial=-1) >= len(self.token_nodes):
            return False
        is_leaf = np.diff(self.child_offsets) == 0
        is_leaf[0] = False
        return bool(
            counts[0] == 0
            and (counts[is_leaf] > 0).all()
            and np.array_equal(self.token_nodes[ids], np.repeat(np.arange(len(counts)), counts))
            and np.count_nonzero(self.token_nodes != -1) == len(ids)
        )


def _are_offsets(offsets: Ids, total: int) -> bool:
    """Whether these are rising, from 0 to `total`."""
    # Not by differences, which may overflow.
    return bool(offsets[0] == 0 and offsets[-1] == total and (offsets[1:] >= offsets[:-1]).all())


def _starts(groups: npt.NDArray[np.int64], num_groups: int) -> Ids:
    """``[num_groups + 1]`` offsets of each group in an array sorted by group."""
    starts = np.zeros(num_groups + 1, np.int32)
    np.cumsum(np.bincount(groups, minlength=num_groups), out=starts[1:])
    return starts


def _depth_first(
    parent: npt.NDArray[np.int64], levels: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """New number of every node, depth-first with children in their old order, and subtree sizes.

    Old numbers are level by level, and within a level by parent and piece; `levels`
    holds where each level starts. Both results are by old number.
    """
    sizes = np.ones(len(parent), np.int64)
    bounds = list(pairwise(levels))
    for start, end in bounds[:0:-1]:
        np.add.at(sizes, parent[start:end], sizes[start:end])
    order = np.zeros(len(parent), np.int64)
    for start, end in bounds[1:]:
        before = np.cumsum(sizes[start:end]) - sizes[start:end]
        above = parent[start:end]
        is_first = np.diff(above, prepend=-1) != 0
        first = np.maximum.accumulate(np.where(is_first, np.arange(end - start), 0))
        order[start:end] = order[above] + 1 + before - before[first]
    return order, sizes
