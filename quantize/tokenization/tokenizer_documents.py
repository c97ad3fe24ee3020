"""`tokenizer.json` documents written from a list of pieces and how they are merged."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from .pretokenizers import PreTokenizer

SPACE_MARK = "▁"


class PieceKind(IntEnum):
    """What a piece is for; the numbers are SentencePiece's, which GGUF uses too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    """A row of the embedding without a token."""
    BYTE = 6


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One token of a vocabulary; its place in the list is its id."""

    text: str
    kind: PieceKind
    score: float = 0.0
    """The higher, the earlier it is merged; SentencePiece only."""
    is_special: bool | None = None
    """Whether it is left out of the text; None where its kind decides."""


Merges = Sequence[tuple[str, str]]
SpacePrefix = Literal["never", "first", "always"]
"""Where a space is added: nowhere; before a text that does not begin with one (as transformers
does for SentencePiece models that are not `legacy`); or there and after each special token."""


def byte_level_document(
    pieces: Sequence[Piece], merges: Merges, pre: PreTokenizer, bos: str | None
) -> dict[str, Any]:
    """Byte-level BPE; `bos` is put before every sequence where it is given."""
    vocab = _ids(pieces)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(pieces),
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.document,
        "post_processor": _begin_with(bos, vocab),
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre.ignore_merges),
    }


def space_mark_document(
    pieces: Sequence[Piece], *, space_prefix: SpacePrefix, bos: str | None
) -> dict[str, Any]:
    """BPE over text with ``▁`` for a space, its merges found from the pieces' scores."""
    vocab = _ids(pieces)
    unknown = next((piece.text for piece in pieces if piece.kind == PieceKind.UNKNOWN), None)
    if unknown is None and "<unk>" in vocab:
        unknown = "<unk>"
    unmark = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    decoders: list[dict[str, Any]] = [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if space_prefix != "never":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(pieces),
        **_marked_spaces(space_prefix),
        "post_processor": _begin_with(bos, vocab),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocab,
            merges_from_scores(pieces),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(piece.kind == PieceKind.BYTE for piece in pieces),
        ),
    }


def to_json(document: Mapping[str, Any]) -> str:
    """The document as the text of a `tokenizer.json`."""
    return json.dumps(document, ensure_ascii=False)


def merges_from_scores(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the one to be done first in front.

    SentencePiece joins whichever neighbours make the piece of the highest score. Where
    two joins have the same score the longer left part goes first, then the longer right
    part, then the lower ids: the order of published `tokenizer.json` files. User-defined
    pieces are matched before any merge and count as score 0, whatever the file says.
    """
    mergeable = (PieceKind.NORMAL, PieceKind.USER_DEFINED)
    ids = {p.text: i for i, p in enumerate(pieces) if p.kind in mergeable}
    sizes = sorted({0, *map(len, ids)})
    joins: list[tuple[float, int, int, int, int]] = []
    for text, i in ids.items():
        if len(text) < 2:
            continue
        score = 0.0 if pieces[i].kind == PieceKind.USER_DEFINED else pieces[i].score
        # No part is longer than this: a piece of 100,000 characters has few places to cut.
        longest = sizes[bisect_left(sizes, len(text)) - 1]
        for cut in range(max(1, len(text) - longest), longest + 1):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                joins.append((-score, -cut, cut - len(text), left, right))
    joins.sort()
    return [(pieces[left].text, pieces[right].text) for _, _, _, left, right in joins]


def _ids(pieces: Sequence[Piece]) -> dict[str, int]:
    """Text -> id of every token; rows without a token are left out."""
    return {p.text: i for i, p in enumerate(pieces) if p.kind != PieceKind.UNUSED}


def _added_tokens(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split."""
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = []
    for i, piece in enumerate(pieces):
        if piece.kind in (*special, PieceKind.USER_DEFINED):
            is_special = piece.kind in special if piece.is_special is None else piece.is_special
            added.append({"id": i, "content": piece.text, **flags, "special": is_special})
    return added


def _begin_with(bos: str | None, vocab: Mapping[str, int]) -> dict[str, Any]:
    """A post-processor that puts `bos` before a text, or nothing where it is None."""
    first = [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": 0}}]
    second = [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": 1}}]
    text_a, text_b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    known = {} if bos is None else {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}}
    return {
        "type": "TemplateProcessing",
        "single": [*first, text_a],
        "pair": [*first, text_a, *second, text_b],
        "special_tokens": known,
    }


def _marked_spaces(prefix: SpacePrefix) -> dict[str, Any]:
    """The steps that write a space as a mark."""
    if prefix == "first":
        marks = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": "first"}
        return {"normalizer": None, "pre_tokenizer": {**marks, "split": False}}
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    if prefix == "never":
        return {"normalizer": mark, "pre_tokenizer": None}
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    steps = {"type": "Sequence", "normalizers": [prepend, mark]}
    return {"normalizer": steps, "pre_tokenizer": None}


def _bpe(vocab: Mapping[str, int], merges: Merges, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**defaults, **options, "vocab": vocab, "merges": merges}
