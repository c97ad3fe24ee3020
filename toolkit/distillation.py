"""Distillation targets: the teacher's law over tokens, as laws over the drafter's pieces.

The teacher's law is known at every piece from its law over tokens alone: the mass of each
first piece where a token begins, and the mass of each branch of the spelling trie inside of
a run. So every position of a text teaches a distribution, and not a single piece.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .bridge.spelling import Spellings

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenLaws:
    """What the teacher said before each token of a text."""

    token_ids: Ids
    """``[tokens]`` the text."""
    top_ids: Ids
    """``[tokens, top]`` its likeliest tokens before each one."""
    probs: Floats
    """``[tokens, top]`` their probabilities; they sum to at most 1."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PieceLaws:
    """What the drafter should say before each piece of a text."""

    ids: Ids
    """``[pieces, top]`` distinct pieces by falling probability; 0 where ``probs`` is 0."""
    probs: Floats
    """``[pieces, top]``; what is missing to 1 belongs to pieces that are not listed."""


_LONGEST = 12
"""Pieces of the longest spelling that is followed; very long tokens are rare in text."""


def spelling_paths(spellings: Spellings, num_tokens: int) -> Ids:
    """``[tokens, longest spelling]`` pieces of every token, -1 after its end.

    A row of -1 only stands for a token that is not mapped, or is spelled too long.
    """
    lengths = np.diff(spellings.offsets)
    width = min(_LONGEST, int(lengths.max(initial=1)))
    paths = np.full((num_tokens, width), -1, np.int32)
    is_short = np.repeat(lengths <= width, lengths)
    rows = np.repeat(spellings.token_ids, lengths)[is_short]
    columns = np.arange(len(spellings.pieces)) - np.repeat(spellings.offsets[:-1], lengths)
    paths[rows, columns[is_short]] = spellings.pieces[is_short]
    return paths


def locate_pieces(
    paths: Ids, token_ids: Ids, token_starts: Ids, pieces: Ids, piece_starts: Ids
) -> tuple[Ids, Ids]:
    """Where each piece of a text lies in the spellings of its tokens.

    Args:
        paths: ``[vocab, longest]`` from `spelling_paths`.
        token_ids: ``[tokens]`` the text.
        token_starts: ``[tokens]`` first byte of each, rising strictly.
        pieces: ``[pieces]`` the same bytes in the drafter's pieces.
        piece_starts: ``[pieces]`` first byte of each.

    Returns:
        ``[pieces]`` index of the token that a piece begins in, and ``[pieces]`` its place in
        that token's spelling; -1 for a piece that lies across the spelling.
    """
    tokens = np.searchsorted(token_starts, piece_starts, side="right").astype(np.int32) - 1
    depths = np.full(len(pieces), -1, np.int32)
    for j, i in enumerate(tokens.tolist()):
        if piece_starts[j] == token_starts[i]:
            depths[j] = 0
        elif j and tokens[j - 1] == i and depths[j - 1] >= 0:
            depth = depths[j - 1]
            path = paths[token_ids[i]]
            if depth + 1 < len(path) and path[depth] == pieces[j - 1] and path[depth + 1] >= 0:
                depths[j] = depth + 1
    return tokens, depths


def piece_laws(
    laws: TokenLaws, paths: Ids, pieces: Ids, tokens: Ids, depths: Ids, *, num_top: int
) -> PieceLaws:
    """The teacher's laws pushed into the drafter's pieces.

    Where a token begins, the law is the mass of each first piece; if the token before could
    have gone on, its branches take their share first. Inside of a token it is the share of
    each branch among the tokens that begin alike; the share of the token that ends there is
    left open, as the law after it is not known. A piece across a spelling is its own law.

    Args:
        laws: of the text.
        paths: ``[vocab, longest]`` from `spelling_paths`.
        pieces: ``[pieces]`` the text in the drafter's pieces.
        tokens: ``[pieces]`` and
        depths: ``[pieces]`` from `locate_pieces`.
        num_top: Pieces kept a position.

    Source:
        Leviathan et al. 2023, arXiv:2211.17192, for the acceptance that this law governs; the
        branches are those of trie-hierarchical rejection (docs/algorithm of this project).
    """
    entries = _Entries(len(pieces), num_top)
    first, inner, own = (np.flatnonzero(mask) for mask in _kinds(depths))
    entries.add(own, pieces[own][:, None], np.ones((len(own), 1), np.float32))

    # What goes on from the token before, if its pieces are exactly its spelling.
    before = tokens[first] - 1
    ends = path_lengths(paths)[laws.token_ids[before]]
    last = np.maximum(first - 1, 0)
    is_whole = (before >= 0) & (depths[last] == ends - 1) & (ends > 0)
    goes_on, shares = _branches(laws, paths, before, np.where(is_whole, ends, 0))
    shares[~is_whole] = 0
    entries.add(first, goes_on, shares)

    begins = paths[laws.top_ids[tokens[first]], 0]
    stops = 1 - shares.sum(axis=1, keepdims=True)
    entries.add(first, begins, laws.probs[tokens[first]] * stops)

    entries.add(inner, *_branches(laws, paths, tokens[inner], depths[inner]))
    return entries.laws()


def _kinds(depths: Ids) -> tuple[npt.NDArray[np.bool_], ...]:
    return depths == 0, depths > 0, depths < 0


def path_lengths(paths: Ids) -> npt.NDArray[np.int64]:
    """``[vocab]`` pieces of every token's spelling; 0 for one without."""
    lengths: npt.NDArray[np.int64] = (paths >= 0).sum(axis=1)
    return lengths


def _branches(laws: TokenLaws, paths: Ids, tokens: Ids, depths: Any) -> tuple[Ids, Floats]:
    """Pieces after the first `depths` of each token's spelling, and their shares.

    Returns:
        ``[positions, top]`` pieces and shares of the mass of all tokens that begin alike;
        0 where a likely token does not go on from there.
    """
    others = paths[laws.top_ids[tokens]]
    actual = paths[laws.token_ids[tokens]][:, None]
    columns = np.arange(paths.shape[1])
    is_later = columns >= np.asarray(depths)[:, None, None]
    is_alike = ((others == actual) | is_later).all(axis=2)
    mass = np.where(is_alike, laws.probs[tokens], 0)
    at = np.minimum(depths, paths.shape[1] - 1)
    following = np.take_along_axis(others, at[:, None, None], axis=2)[:, :, 0]
    following = np.where((np.asarray(depths) < paths.shape[1])[:, None], following, -1)
    total = np.maximum(mass.sum(axis=1, keepdims=True), 1e-9)
    return following, np.where(following >= 0, mass / total, 0).astype(np.float32)


class _Entries:
    """Sums the masses of equal pieces at equal positions."""

    def __init__(self, num_positions: int, num_top: int) -> None:
        self._num_positions, self._num_top = num_positions, num_top
        self._rows: list[npt.NDArray[np.int64]] = []
        self._ids: list[npt.NDArray[np.int64]] = []
        self._masses: list[Floats] = []

    def add(self, positions: Any, ids: Ids, masses: Floats) -> None:
        """``[positions, any]`` pieces and masses; entries without a piece are left out."""
        rows = np.repeat(positions, ids.shape[1])
        is_used = (ids.ravel() >= 0) & (masses.ravel() > 0)
        self._rows.append(rows[is_used])
        self._ids.append(ids.ravel()[is_used].astype(np.int64))
        self._masses.append(masses.ravel()[is_used])

    def laws(self) -> PieceLaws:
        """The likeliest pieces of every position."""
        rows, ids = np.concatenate(self._rows), np.concatenate(self._ids)
        keys, inverse = np.unique((rows << 32) | ids, return_inverse=True)
        masses = np.bincount(inverse, np.concatenate(self._masses), len(keys))
        rows, ids = keys >> 32, keys & 0xFFFFFFFF
        order = np.lexsort((-masses, rows))
        rows, ids, masses = rows[order], ids[order], masses[order]
        starts = np.searchsorted(rows, np.arange(self._num_positions))
        ranks = np.arange(len(rows)) - starts[rows]
        is_kept = ranks < self._num_top
        shape = self._num_positions, self._num_top
        top_ids, probs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        top_ids[rows[is_kept], ranks[is_kept]] = ids[is_kept]
        probs[rows[is_kept], ranks[is_kept]] = masses[is_kept]
        return PieceLaws(ids=top_ids, probs=probs)
