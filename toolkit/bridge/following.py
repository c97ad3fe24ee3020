"""The drafter's view of the context: its own pieces for the bytes that the target decided."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from .pieces import PieceEncoder
from .spelling import end_pieces
from .vocabulary import END_ROLES, Role, Vocabulary

_SETTLED_BYTES = 24
"""Bytes kept between the end of the text and the place from where it is spelled anew."""
_MAX_TAIL_BYTES = 256
"""Text without a boundary is spelled anew from any piece this far back."""


class Bridge(Protocol):
    """Follows a context of target ids in drafter pieces."""

    @property
    def pieces(self) -> Sequence[int]:
        """Pieces of the whole context so far, BOS included where the drafter wants one."""
        ...

    @property
    def num_head(self) -> int:
        """Leading pieces that must stay in front of any later part of the context: 0 or 1."""
        ...

    def begin(self, token_ids: Sequence[int]) -> None:
        """Follow a new context."""
        ...

    def extend(self, token_ids: Sequence[int]) -> int:
        """Append target ids; how many of the earlier pieces were surely left as they were."""
        ...


class IdentityBridge:
    """For equal tokenizers: the target's ids are the drafter's pieces.

    Ids from `num_pieces` on, which the drafter has no row for, are left out.
    """

    num_head = 0

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self.pieces: list[int] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        """Follow a new context."""
        self.pieces = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> int:
        """Append target ids; no earlier piece changes."""
        length = len(self.pieces)
        self.pieces += [i for i in token_ids if i < self._num_pieces]
        return length


class ByteBridge:
    """Spells the target's bytes in drafter pieces, the tail anew whenever it grows.

    The pieces are what the drafter's tokenizer gives for the whole text: only a tail is
    spelled again, from a place where its tokenizer always begins a new piece, so a
    round costs the same at any length. Special tokens of the target become the
    drafter's special token of equal content, else of equal end role, else their text.
    The target's first BOS, its padding and unknown tokens are left out.
    """

    def __init__(self, encoder: PieceEncoder, target: Vocabulary) -> None:
        drafter = encoder.vocabulary
        self._encoder = encoder
        self._target = target
        self._special = _special_pieces(drafter, target)
        self._head = [] if drafter.bos_token_id is None else [drafter.bos_token_id]
        self._never_before_space = ~drafter.is_before_space
        self.num_head = len(self._head)
        self.begin(())

    def begin(self, token_ids: Sequence[int]) -> None:
        """Follow a new context."""
        self.pieces = list(self._head)
        self._starts = [0] * len(self._head)
        self._text = bytearray()
        """Bytes since the last special piece, from `_starts` counts."""
        self._run = len(self._head)
        """First piece of that text."""
        has_bos = len(token_ids) > 0 and token_ids[0] == self._target.bos_token_id
        self.extend(token_ids[1:] if has_bos else token_ids)

    def extend(self, token_ids: Sequence[int]) -> int:
        """Append target ids; how many of the earlier pieces were surely left as they were."""
        kept = len(self.pieces)
        for item in self._items(token_ids):
            if isinstance(item, bytes):
                kept = min(kept, self._append_text(item))
            else:
                self.pieces.append(item)
                self._starts.append(0)
                self._run = len(self.pieces)
                self._text.clear()
        return kept

    def _items(self, token_ids: Sequence[int]) -> Iterator[bytes | int]:
        """Bytes of runs of text, and special pieces between them."""
        run: list[bytes] = []
        for i in token_ids:
            special = self._special.get(i)
            if isinstance(special, int):
                if run:
                    yield b"".join(run)
                    run = []
                yield special
            else:
                run.append(self._target.token_bytes(i) if special is None else special)
        if run:
            yield b"".join(run)

    def _append_text(self, data: bytes) -> int:
        """Spell the tail anew with `data` after it; how many earlier pieces stay."""
        text = self._text
        anchor = self._anchor()
        start = 0 if anchor == self._run else self._starts[anchor]
        text += data
        before = self.pieces[anchor:]
        pieces, starts = self._encoder.encode(bytes(text[start:]))
        self.pieces[anchor:] = pieces
        self._starts[anchor:] = [start + at for at in starts]
        same = 0
        while same < min(len(before), len(pieces)) and before[same] == pieces[same]:
            same += 1
        return anchor + same

    def _anchor(self) -> int:
        """A piece at which the pieces before it no longer depend on what follows."""
        text, starts = self._text, self._starts
        for i in range(len(starts) - 1, self._run, -1):
            at = starts[i]
            distance = len(text) - at
            if distance >= _SETTLED_BYTES and self._is_boundary(at):
                return i
            if distance >= _MAX_TAIL_BYTES and text[at] & 0xC0 != 0x80:
                return i
        return self._run

    def _is_boundary(self, at: int) -> bool:
        """Whether the drafter's tokenizer begins a piece here, whatever lies around.

        A space after a byte that no piece joins to a space, unless that byte ends
        another space, which pre-tokenizers may take together with this one.
        """
        text = self._text
        if text[at] != 0x20 or not self._never_before_space[text[at - 1]]:
            return False
        return not text[max(0, at - 4) : at].decode(errors="ignore")[-1:].isspace()


def _special_pieces(drafter: Vocabulary, target: Vocabulary) -> dict[int, int | bytes]:
    """What stands for each target id without bytes: a special piece or some text."""
    usable = set(drafter.special_ids(*END_ROLES, Role.OTHER)) - {drafter.bos_token_id}
    pieces = {drafter.special_contents[i]: i for i in usable}
    table: dict[int, int | bytes] = {}
    for i in target.special_ids(*set(Role) - {Role.TEXT}):
        content = target.special_contents.get(i, "")
        is_text = target.roles[i] not in (Role.BOS, Role.PAD, Role.UNK)
        table[i] = pieces.get(content, content.encode() if is_text else b"")
    return table | end_pieces(drafter, target)
