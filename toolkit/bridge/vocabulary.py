"""The exact bytes of every token of a tokenizer, and the roles of the ids that have none."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from ..documents import convert_document, shown_value
from ..errors import TokenizerError

SPACE_MARK = "▁"
VocabularyId = Annotated[int, Meta(ge=0, lt=2**22)]
"""Sixteen times the ids of the largest vocabularies; arrays of this many are still small."""
_UNUSED = re.compile(r"<\|?(?:unused|reserved)[\w-]*\|?>")
_PAD = re.compile(r"[<\[]\|?(?:pad|padding|finetune_right_pad_id|pad_token)\|?[>\]]", re.IGNORECASE)
_END_OF_TURN = re.compile(r"(?:im_end|end_of_turn|turn_end|end_of_message|eot|eom|\|end\|)")


class Role(IntEnum):
    """What an id stands for; only `TEXT` ids have bytes."""

    TEXT = 0
    EOS = 1
    END_OF_TURN = 2
    BOS = 3
    PAD = 4
    UNK = 5
    OTHER = 6
    """Any other special token, chat markup for one."""
    UNUSED = 7
    """A row without a token, or reserved; masked wherever it could be chosen."""


END_ROLES = (Role.EOS, Role.END_OF_TURN)


@dataclass(frozen=True, eq=False, kw_only=True)
class Vocabulary:
    """Bytes and role of every id below `size`.

    Two ids may stand for the same bytes. `by_bytes` then knows the preferred one: a
    text piece before a byte-fallback piece, then the lowest id. The others keep their
    bytes but are never chosen to spell something.
    """

    blob: bytes
    offsets: npt.NDArray[np.int64]
    """``[size + 1]``; id i stands for ``blob[offsets[i]:offsets[i + 1]]``."""
    roles: npt.NDArray[np.uint8]
    """``[size]`` values of `Role`."""
    is_fallback: npt.NDArray[np.bool_]
    """``[size]`` whether an id is a byte-fallback piece such as ``<0x0A>``."""
    special_contents: Mapping[int, str]
    """Content of every id that is not text; nothing for rows without a token."""
    bos_token_id: int | None
    """First id of every sequence, None where the model wants none."""

    @classmethod
    def from_tokenizer_json(
        cls,
        document: Mapping[str, Any],
        *,
        size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
    ) -> "Vocabulary":
        """The vocabulary of a parsed `tokenizer.json`.

        Args:
            document: Byte-level BPE, or BPE over text with ``▁`` for a space.
            size: Ids the model has; ids from there on are left out, rows without a
                token are `UNUSED`. None: all ids of the document.
            eos_token_ids: Every id that ends a response.
            bos_token_id: First id of every sequence, None where the model wants none.

        Raises:
            TokenizerError: another kind of tokenizer, or a token that has no bytes.
        """
        kind = kind_of(document)
        model = _converted(_only(document["model"], _Model), _Model)
        tokens = _converted(document.get("added_tokens") or (), tuple[_AddedToken, ...])
        contents: dict[int, str] = {i: token for token, i in model.vocab.items()}
        added = {entry.id: entry for entry in tokens}
        only_added = added.keys() - contents.keys()
        contents |= {i: entry.content for i, entry in added.items()}
        if size is None:
            size = max(contents, default=-1) + 1

        roles = np.full(size, Role.UNUSED, np.uint8)
        ids = np.fromiter(contents, np.int64, len(contents))
        roles[ids[ids < size]] = Role.TEXT
        for i, entry in added.items():
            if i < size:
                roles[i] = _added_role(entry)
        unknown = model.unk_token
        for i in {model.vocab.get(unknown), *added} if unknown else ():
            if i is not None and i < size and contents[i] == unknown:
                roles[i] = Role.UNK
        if bos_token_id is not None and bos_token_id < size:
            roles[bos_token_id] = Role.BOS
        for i in eos_token_ids:
            if i < size:
                is_turn = _END_OF_TURN.search(contents.get(i, "")) is not None
                roles[i] = Role.END_OF_TURN if is_turn else Role.EOS

        is_fallback = np.zeros(size, np.bool_)
        pieces = [b""] * size
        for i in np.flatnonzero(roles == Role.TEXT).tolist():
            if kind == "byte_level":
                pieces[i] = contents[i].encode() if i in only_added else alphabet_bytes(contents[i])
            else:
                pieces[i] = contents[i].replace(SPACE_MARK, " ").encode()
        if model.byte_fallback:
            for byte in range(256):
                i = model.vocab.get(f"<0x{byte:02X}>", size)
                if i < size:
                    pieces[i], is_fallback[i] = bytes([byte]), True
        offsets = np.zeros(size + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        return cls(
            blob=b"".join(pieces),
            offsets=offsets,
            roles=roles,
            is_fallback=is_fallback,
            special_contents={
                i: contents[i] for i in np.flatnonzero(roles != Role.TEXT).tolist() if i in contents
            },
            bos_token_id=bos_token_id,
        )

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.roles)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id; empty for one that is not text."""
        return self.blob[self.offsets[token_id] : self.offsets[token_id + 1]]

    def all_bytes(self) -> list[bytes]:
        """The bytes of every id, in order."""
        offsets = self.offsets.tolist()
        return [self.blob[a:b] for a, b in pairwise(offsets)]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """``[size]`` number of bytes of every id."""
        return np.diff(self.offsets)

    @cached_property
    def is_special(self) -> npt.NDArray[np.bool_]:
        """``[size]`` whether an id has a role of its own and no bytes."""
        is_special: npt.NDArray[np.bool_] = self.roles != Role.TEXT
        return is_special

    def special_ids(self, *roles: Role) -> tuple[int, ...]:
        """Ids of these roles, in order."""
        return tuple(np.flatnonzero(np.isin(self.roles, roles)).tolist())

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Preferred id of every byte string that is a token."""
        table: dict[bytes, int] = {}
        pieces = self.all_bytes()
        # Later entries win: byte-fallback pieces first, then text pieces, each from the highest id.
        for fallback in (True, False):
            for i in np.flatnonzero(self.is_fallback == fallback)[::-1].tolist():
                table[pieces[i]] = i
        table.pop(b"", None)
        return table

    @cached_property
    def is_before_space(self) -> npt.NDArray[np.bool_]:
        """``[256]`` bytes that some token joins to a space after them.

        After any other byte a space always begins a new token.
        """
        text = np.frombuffer(self.blob, np.uint8)
        is_start = np.zeros(len(text) + 1, np.bool_)
        is_start[self.offsets] = True
        joined = text[:-1][(text[1:] == 0x20) & ~is_start[1 : len(text)]]
        return np.isin(np.arange(256), joined)


def kind_of(document: Mapping[str, Any]) -> str:
    """`byte_level` or `space_mark`, the two kinds of BPE vocabulary that have exact bytes.

    Raises:
        TokenizerError: any other kind.
    """
    if not isinstance(document, Mapping):
        raise TokenizerError("tokenizer.json is not an object: get the tokenizer's files again")
    model = _converted(_only(document.get("model") or {}, _Kind), _Kind)
    supported = "supported are byte-level BPE and BPE with '▁' for a space"
    if model.type != "BPE":
        shown = shown_value(model.type)
        raise TokenizerError(f"tokenizer model {shown} is not supported: {supported}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if value := getattr(model, name):
            shown = shown_value(value)
            raise TokenizerError(f"BPE with {name} {shown} is not supported: {supported}")
    steps = {
        name: _nodes(_converted(document.get(name), _Step | None))
        for name in ("normalizer", "pre_tokenizer", "decoder")
    }
    for name in ("pre_tokenizer", "decoder"):
        if any(node.type == "ByteLevel" for node in steps[name]):
            return "byte_level"
    if any(_marks_spaces(node) for nodes in steps.values() for node in nodes):
        return "space_mark"
    raise TokenizerError(f"BPE without a byte alphabet or a mark for spaces: {supported}")


class _AddedToken(Struct, frozen=True):
    id: VocabularyId
    content: str
    special: bool = False


class _Model(Struct, frozen=True):
    vocab: dict[str, VocabularyId]
    unk_token: str | None = None
    byte_fallback: bool | None = None


class _Kind(Struct, frozen=True):
    type: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Step(Struct, frozen=True):
    type: str | None = None
    normalizers: tuple["_Step", ...] | None = None
    pretokenizers: tuple["_Step", ...] | None = None
    decoders: tuple["_Step", ...] | None = None
    pattern: dict[str, Any] | None = None
    content: str | None = None


def _only(part: Any, kind: type[Struct]) -> Any:
    """The keys of an object that its type has: half a million merges need not be looked through."""
    if not isinstance(part, Mapping):
        return part
    return {name: part[name] for name in kind.__struct_fields__ if name in part}


def _converted(part: Any, kind: Any) -> Any:
    """A part of `tokenizer.json` in checked types.

    Raises:
        TokenizerError: it is of another form.
    """
    advice = "get the tokenizer's files again"
    return convert_document(part, kind, "tokenizer.json", error=TokenizerError, advice=advice)


def _nodes(step: _Step | None) -> list[_Step]:
    """A pipeline step with the parts of nested sequences."""
    if step is None:
        return []
    parts = step.normalizers or step.pretokenizers or step.decoders or ()
    return [step, *(node for part in parts for node in _nodes(part))]


def _marks_spaces(node: _Step) -> bool:
    if node.type == "Metaspace":
        return True
    pattern = (node.pattern or {}).get("String")
    return node.type == "Replace" and SPACE_MARK in (pattern, node.content)


def _added_role(entry: _AddedToken) -> Role:
    if _UNUSED.fullmatch(entry.content):
        return Role.UNUSED
    if not entry.special:
        return Role.TEXT
    return Role.PAD if _PAD.fullmatch(entry.content) else Role.OTHER


def _byte_alphabet() -> dict[int, int]:
    """Code point that stands for a byte in byte-level BPE -> the byte.

    Printable Latin-1 bytes stand for themselves, the other 68 for the code points
    from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


# Code points outside the alphabet become one that Latin-1 cannot hold.
_ALPHABET = dict.fromkeys([*range(0x21), *range(0x7F, 0xA1), 0xAD], 0xFFFF) | _byte_alphabet()


def alphabet_bytes(content: str) -> bytes:
    """The bytes that a byte-level BPE token spells."""
    try:
        return content.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # a character outside the alphabet: ByteLevel decoders keep it
        return content.encode()
