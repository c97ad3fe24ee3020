"""A trie with one more token: copies of the flat arrays, not a build of all spellings."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..proposal import ROOT
from .spelling import Ids
from .trie import SpellingTrie


def with_token(trie: SpellingTrie, token_id: int, pieces: Sequence[int]) -> SpellingTrie:
    """The trie in which `token_id` is spelled `pieces` too, equal to one that is built anew.

    `trie` stays as it is. Of tokens that are spelled alike this one comes last.

    Raises:
        ValueError: the token is in the trie already, or there are no pieces.
    """
    if not pieces or trie.token_nodes[token_id] >= 0:
        raise ValueError(f"token {token_id} with {len(pieces)} pieces cannot be added")
    path = _existing_path(trie, pieces)
    parent, missing = path[-1], pieces[len(path) - 1 :]
    # The missing nodes are a chain under `parent`, numbered from `first` on.
    branch, first = trie.child_offsets[parent], trie.subtree_ends[parent]
    if missing:
        branch += trie.children(parent)[0].searchsorted(missing[0])
        if branch < trie.child_offsets[parent + 1]:
            first = trie.child_nodes[branch]
    num_new = np.int32(len(missing))
    nodes = np.arange(first, first + num_new, dtype=np.int32)
    end = nodes[-1] if missing else parent

    subtree_ends = _shifted(trie.subtree_ends, first + 1, num_new)
    subtree_ends[path] = trie.subtree_ends[path] + num_new
    num_children = np.diff(trie.child_offsets)
    num_children[parent] += len(missing) > 0
    num_tokens = np.insert(np.diff(trie.token_offsets), first, np.zeros(num_new, np.int32))
    num_tokens[end] += 1
    token_offsets = _offsets(num_tokens)
    token_nodes = _shifted(trie.token_nodes, first, num_new)
    token_nodes[token_id] = end
    # The entries of the chain's own children come where those of node `first` would begin.
    places = [branch, *[trie.child_offsets[first]] * (len(missing) - 1)][: len(missing)]
    return SpellingTrie(
        child_offsets=_offsets(np.insert(num_children, first, (nodes < end).astype(np.int32))),
        child_pieces=np.insert(trie.child_pieces, places, missing),
        child_nodes=np.insert(_shifted(trie.child_nodes, first, num_new), places, nodes),
        subtree_ends=np.insert(subtree_ends, first, np.full(num_new, first + num_new, np.int32)),
        token_offsets=token_offsets,
        token_ids=np.insert(trie.token_ids, token_offsets[end + 1] - 1, token_id),
        token_nodes=token_nodes,
        aliases=trie.aliases,
    )


def _existing_path(trie: SpellingTrie, pieces: Sequence[int]) -> list[int]:
    """The root and the nodes along `pieces`, as far as there are any."""
    path = [ROOT]
    for piece in pieces:
        children, nodes = trie.children(path[-1])
        at = int(children.searchsorted(piece))
        if at == len(children) or children[at] != piece:
            break
        path.append(int(nodes[at]))
    return path


def _shifted(nodes: Ids, first: int | np.int32, by: np.int32) -> Ids:
    """Node numbers after `by` new nodes took the numbers from `first` on."""
    return nodes + (nodes >= first) * by


def _offsets(counts: npt.NDArray[np.int32]) -> Ids:
    """``[groups + 1]`` where each group begins."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
