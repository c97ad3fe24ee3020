"""The online n-gram cache: spellings of those target tokens that the target really emits."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .growing import with_token
from .ngram_entries import NgramEntries
from .pieces import PieceEncoder
from .spelling import Spellings
from .trie import SpellingTrie
from .vocabulary import Vocabulary

DEFAULT_MAX_BYTES = 1_000_000
"""Of `NgramEntries.nbytes`: some 45,000 entries."""


class NgramCache:
    """A spelling trie that learns: the direct map, and every other token that was emitted.

    A token without an equal piece is spelled when the target first emits it. When the
    entries outgrow their budget an eighth of it is freed: the least frequently used go,
    of equally used ones the least recently used. The direct map always stays.

    Source:
        OmniDraft, arXiv:2507.02659, sections on the n-gram cache and its eviction.
    """

    trie: SpellingTrie
    """All spellings now. Learning puts another trie in its place: one in use never changes."""

    def __init__(
        self,
        encoder: PieceEncoder,
        target: Vocabulary,
        direct: Spellings,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """A cache without entries.

        Args:
            encoder: Spells in the drafter's pieces.
            target: The vocabulary whose tokens are spelled.
            direct: What `direct_spellings` gives for both.
            max_bytes: Most bytes of entries, see `NgramEntries.nbytes`.
        """
        self._encoder = encoder
        self._target = target
        self._direct = direct
        self._max_bytes = max_bytes
        self._slots: dict[int, int] = {}
        self._fresh = array("i")
        """Uses since they were last taken, by slot."""
        self._set(NgramEntries.EMPTY)

    def __len__(self) -> int:
        return len(self._token_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Learn from what the target emitted; to be called between rounds only."""
        for token_id in token_ids:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._learn(token_id)
            if slot is not None:
                self._clock += 1
                self._last_used[slot] = self._clock
                self._uses[slot] += 1
                self._fresh[slot] += 1
        if NgramEntries.size_of(len(self._token_ids), len(self._pieces)) > self._max_bytes:
            self._set(self.entries().pruned(self._max_bytes - self._max_bytes // 8))

    def entries(self) -> NgramEntries:
        """All entries with all their uses."""
        return self._entries(self._uses)

    def take_fresh(self) -> NgramEntries:
        """The entries used since the last call, with their uses since then."""
        fresh = self._entries(self._fresh)
        self._fresh = array("i", bytes(4 * len(self)))
        return fresh

    def add(self, entries: NgramEntries) -> None:
        """Add entries of the same pair from elsewhere; the budget is kept.

        An entry that does not spell its token is left out.
        """
        right = [i for i, (token, run, _) in enumerate(entries) if self._is_spelling(token, run)]
        added = entries.take(np.array(right, np.int64))
        self._set(added.merged(self.entries()).pruned(self._max_bytes))

    def _is_spelling(self, token_id: int, pieces: Sequence[int]) -> bool:
        drafter, target = self._encoder.vocabulary, self._target
        is_known = token_id < target.size and max(pieces) < drafter.size
        return is_known and target.token_bytes(token_id) == b"".join(
            map(drafter.token_bytes, pieces)
        )

    def _learn(self, token_id: int) -> int | None:
        """Slot of a new entry; None for a token that is direct or cannot be spelled."""
        data = self._target.token_bytes(token_id)
        if self.trie.token_nodes[token_id] >= 0 or not data:
            return None
        (pieces,) = self._encoder.encode_batch([data])
        if not pieces:
            return None
        self.trie = with_token(self.trie, token_id, pieces)
        slot = self._slots[token_id] = len(self)
        self._token_ids.append(token_id)
        self._pieces.extend(pieces)
        self._offsets.append(len(self._pieces))
        for counts in (self._uses, self._fresh, self._last_used):
            counts.append(0)
        return slot

    def _entries(self, uses: "array[int]") -> NgramEntries:
        """The entries that have uses, by these and then by recency."""
        counts, last = np.array(uses, np.int32), np.array(self._last_used, np.int32)
        order = np.lexsort((last, counts))
        return NgramEntries(
            token_ids=np.array(self._token_ids, np.int32),
            offsets=np.array(self._offsets, np.int32),
            pieces=np.array(self._pieces, np.int32),
            uses=counts,
        ).take(order[counts[order] > 0])

    def _set(self, entries: NgramEntries) -> None:
        """Hold exactly these entries; those that stay keep what is fresh of them."""
        fresh = {token_id: self._fresh[slot] for token_id, slot in self._slots.items()}
        self._token_ids = _array(entries.token_ids)
        self._offsets = _array(entries.offsets)
        self._pieces = _array(entries.pieces)
        self._uses = _array(entries.uses)
        self._fresh = array("i", [fresh.get(i, 0) for i in self._token_ids])
        self._last_used = array("i", range(len(entries)))
        self._clock = len(entries)
        self._slots = {token_id: slot for slot, token_id in enumerate(self._token_ids)}
        self.trie = SpellingTrie.build(_joined(self._direct, entries), self._target.size)


def _array(values: npt.NDArray[np.int32]) -> "array[int]":
    return array("i", values.tobytes())


def _joined(direct: Spellings, entries: NgramEntries) -> Spellings:
    """The direct spellings and the entries, of which the most used are preferred."""
    entries = entries.take(np.arange(len(entries))[::-1])
    return Spellings(
        token_ids=np.concatenate([direct.token_ids, entries.token_ids]),
        offsets=np.concatenate([direct.offsets, entries.offsets[1:] + direct.offsets[-1]]),
        pieces=np.concatenate([direct.pieces, entries.pieces]),
        aliases=direct.aliases,
    )
