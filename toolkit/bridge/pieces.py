"""Bytes to drafter pieces that spell exactly those bytes, valid UTF-8 or not."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .vocabulary import SPACE_MARK, Role, Vocabulary, kind_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import Model


class PieceEncoder:
    """Spells byte strings in the pieces of one tokenizer, as its model saw them in training.

    What the tokenizer would add or change (BOS, a prefix space, Unicode normal forms,
    special tokens found in text) is left out. Bytes that it cannot spell exactly go to
    the longest matching pieces from the left.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        vocabulary: Vocabulary,
        model: "Model | None" = None,
    ) -> None:
        """Spell in the pieces of a tokenizer.

        Args:
            document: A parsed `tokenizer.json`.
            vocabulary: Made from it.
            model: The model of a tokenizer made from it, to be shared: to read it again
                takes seconds where the vocabulary is large.
        """
        self.vocabulary = vocabulary
        self._bytes = vocabulary.all_bytes()
        # Where a mark stands for a space, the tokenizer cannot write the mark itself.
        self._mark = SPACE_MARK.encode() if kind_of(document) == "space_mark" else b""
        self._tokenizer = _plain_tokenizer(plain_document(document, vocabulary), model)

    def encode(self, data: bytes) -> tuple[list[int], list[int]]:
        """Pieces that spell `data`, and where in it each begins.

        A byte that no piece holds is left out.
        """
        pieces: list[int] = []
        starts: list[int] = []
        at = 0
        for part, is_text in self._parts(data):
            if not is_text and pieces and self._bytes[pieces[-1]] == b" ":
                # Byte-level pieces often join a space to the first bytes of a character.
                del pieces[-1:], starts[-1:]
                part, at = b" " + part, at - 1
            found, offsets = self._encode_text(part) if is_text else self._longest_matches(part)
            pieces += found
            starts += [at + offset for offset in offsets]
            at += len(part)
        return pieces, starts

    def encode_batch(self, strings: Sequence[bytes]) -> list[list[int]]:
        """The pieces of every byte string; empty for one that cannot be spelled exactly."""
        texts: dict[int, str] = {}
        for i, data in enumerate(strings):
            try:
                texts[i] = data.decode()
            except UnicodeDecodeError:
                continue
        encodings = self._tokenizer.encode_batch_fast(
            list(texts.values()), add_special_tokens=False
        )
        spellings: list[list[int]] = [[] for _ in strings]
        for i, encoding in zip(texts, encodings, strict=True):
            spellings[i] = encoding.ids
        for i, data in enumerate(strings):
            if not self._spells(spellings[i], data):
                pieces, _ = self.encode(data)
                spellings[i] = pieces if self._spells(pieces, data) else []
        return spellings

    def _encode_text(self, data: bytes) -> tuple[list[int], list[int]]:
        pieces: list[int] = self._tokenizer.encode(data.decode(), add_special_tokens=False).ids
        if not self._spells(pieces, data):
            return self._longest_matches(data)
        lengths = [len(self._bytes[piece]) for piece in pieces[:-1]]
        return pieces, list(accumulate(lengths, initial=0))

    def _longest_matches(self, data: bytes) -> tuple[list[int], list[int]]:
        table, longest = self.vocabulary.by_bytes, int(self.vocabulary.lengths.max(initial=0))
        pieces: list[int] = []
        starts: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + longest), at, -1):
                piece = table.get(data[at:end])
                if piece is not None:
                    pieces.append(piece)
                    starts.append(at)
                    at = end
                    break
            else:
                at += 1
        return pieces, starts

    def _spells(self, pieces: Sequence[int], data: bytes) -> bool:
        if not pieces or max(pieces) >= self.vocabulary.size:
            return False
        return b"".join([self._bytes[piece] for piece in pieces]) == data

    def _parts(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """`data` cut into stretches of text and of bytes that are not the tokenizer's text."""
        while data:
            try:
                data.decode()
                start = end = len(data)
            except UnicodeDecodeError as error:
                start, end = error.start, error.end
            mark = data.find(self._mark, 0, start) if self._mark else -1
            if mark >= 0:
                start, end = mark, mark + len(self._mark)
            if start:
                yield data[:start], True
            if end > start:
                yield data[start:end], False
            data = data[end:]


def _plain_tokenizer(document: dict[str, Any], model: "Model | None") -> "Tokenizer":
    """The tokenizer of a document, with `model` in place of the one written there."""
    from tokenizers import AddedToken, Tokenizer

    if model is None:
        return Tokenizer.from_str(json.dumps(document))
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = Tokenizer.from_str(json.dumps(document | {"model": empty, "added_tokens": []}))
    tokenizer.model = model
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokenizer.add_tokens(
        [
            AddedToken(entry["content"], **{flag: entry[flag] for flag in flags})
            for entry in document["added_tokens"]
        ]
    )
    return tokenizer


def plain_document(document: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """A `tokenizer.json` that turns text into text pieces and does nothing else to it."""
    plain = {key: value for key, value in document.items() if key != "model"}
    plain = copy.deepcopy(plain)
    roles = vocabulary.roles
    plain["added_tokens"] = [
        entry
        for entry in plain.get("added_tokens") or ()
        if entry["id"] < vocabulary.size and roles[entry["id"]] == Role.TEXT
    ]
    plain["post_processor"] = plain["truncation"] = plain["padding"] = None
    is_space_mark = kind_of(document) == "space_mark"
    plain["normalizer"] = _mark_spaces_only(plain.get("normalizer")) if is_space_mark else None
    _drop_prefix_space(plain.get("pre_tokenizer"))
    plain["model"] = document["model"]
    return plain


def _mark_spaces_only(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """The part of a normalizer that writes spaces as ``▁``."""
    if step is None:
        return None
    if step["type"] == "Sequence":
        parts = [_mark_spaces_only(part) for part in step["normalizers"]]
        return {"type": "Sequence", "normalizers": [part for part in parts if part]}
    is_mark = step["type"] == "Replace" and step["pattern"].get("String") == " "
    return step if is_mark else None


def _drop_prefix_space(step: dict[str, Any] | None) -> None:
    """Make a pre-tokenizer add no space at the start."""
    if step is None:
        return
    for part in step.get("pretokenizers", ()):
        _drop_prefix_space(part)
    if step["type"] == "Metaspace":
        step["prepend_scheme"] = "never"
        step.pop("add_prefix_space", None)
    elif step["type"] == "ByteLevel":
        step["add_prefix_space"] = False
