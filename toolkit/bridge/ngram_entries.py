"""Learned spellings as flat arrays, with how often each was used."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .spelling import Ids

_ENTRY_BYTES = 12
"""Of the token id, the offset and the count; 4 more for each piece."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NgramEntries:
    """Target tokens that take several drafter pieces, the least used first.

    Among equally used ones the least recently used comes first, so that what must go
    is always a leading part.
    """

    token_ids: Ids
    """``[entries]`` target ids, each once."""
    offsets: Ids
    """``[entries + 1]``; entry i is spelled ``pieces[offsets[i]:offsets[i + 1]]``."""
    pieces: Ids
    """Drafter ids, at least two for each entry."""
    uses: Ids
    """``[entries]`` how often the target emitted each, at least once."""

    EMPTY: ClassVar["NgramEntries"]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[tuple[int, list[int], int]]:
        """Target id, pieces and uses of every entry."""
        pieces, offsets = self.pieces.tolist(), self.offsets.tolist()
        for i, (token_id, uses) in enumerate(
            zip(self.token_ids.tolist(), self.uses.tolist(), strict=True)
        ):
            yield token_id, pieces[offsets[i] : offsets[i + 1]], uses

    @staticmethod
    def size_of(num_entries: int, num_pieces: int) -> int:
        """Bytes that so many entries of so many pieces in all take here."""
        return _ENTRY_BYTES * num_entries + 4 * num_pieces

    @property
    def nbytes(self) -> int:
        """Bytes of the entries, here as on disk."""
        return self.size_of(len(self), len(self.pieces))

    def pruned(self, max_bytes: int) -> "NgramEntries":
        """The most used entries that fit into `max_bytes`."""
        sizes = _ENTRY_BYTES + 4 * np.diff(self.offsets).astype(np.int64)
        fits = np.cumsum(sizes[::-1])[::-1] <= max_bytes
        return self.take(np.flatnonzero(fits))

    def merged(self, later: "NgramEntries") -> "NgramEntries":
        """Both together: uses are added, and `later` counts as used more recently."""
        both = NgramEntries(
            token_ids=np.concatenate([self.token_ids, later.token_ids]),
            offsets=np.concatenate([self.offsets, later.offsets[1:] + self.offsets[-1]]),
            pieces=np.concatenate([self.pieces, later.pieces]),
            uses=np.concatenate([self.uses, later.uses]),
        )
        _, inverse = np.unique(both.token_ids, return_inverse=True)
        total = np.bincount(inverse, weights=both.uses)
        last = np.zeros(len(total), np.int64)
        np.maximum.at(last, inverse, np.arange(len(both)))
        order = np.lexsort((last, total))
        uses = np.minimum(total[order], np.iinfo(np.int32).max).astype(np.int32)
        return both.take(last[order], uses)

    def take(self, order: npt.NDArray[np.int64], uses: Ids | None = None) -> "NgramEntries":
        """The entries of these indices, in this order, with other counts where they are given."""
        lengths = np.diff(self.offsets)[order]
        offsets = np.zeros(len(order) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        shift = np.repeat(self.offsets[order] - offsets[:-1], lengths)
        return NgramEntries(
            token_ids=self.token_ids[order],
            offsets=offsets,
            pieces=self.pieces[shift + np.arange(offsets[-1])],
            uses=self.uses[order] if uses is None else uses,
        )


_NONE: Ids = np.zeros(0, np.int32)
NgramEntries.EMPTY = NgramEntries(
    token_ids=_NONE, offsets=np.zeros(1, np.int32), pieces=_NONE, uses=_NONE
)
