"""Bytes to drafter pieces that spell exactly those bytes, valid UTF-8 or not."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .vocabulary import Role, Vocabulary, kind_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PieceEncoder:
    """Spells byte strings in the pieces of one tokenizer, as its model saw them in training.

    What the tokenizer would add or change (BOS, a prefix space, Unicode normal forms,
    special tokens found in text) is left out. Bytes that it cannot spell exactly go to
    the longest matching pieces from the left.
    """

    def __init__(self, document: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        """Args: a parsed `tokenizer.json` and the vocabulary made from it."""
        from tokenizers import Tokenizer

        self.vocabulary = vocabulary
        self._tokenizer: Tokenizer = Tokenizer.from_str(
            json.dumps(plain_document(document, vocabulary))
        )

    def encode(self, data: bytes) -> list[int]:
        """Pieces whose bytes are `data`; a byte that no piece holds is left out."""
        pieces: list[int] = []
        while data:
            try:
                text, rest = data.decode(), b""
                broken = b""
            except UnicodeDecodeError as error:
                text, broken = data[: error.start].decode(), data[error.start : error.end]
                rest = data[error.end :]
            if text:
                pieces += self._encode_text(text)
            pieces += self._longest_matches(broken)
            data = rest
        return pieces

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
        table = self.vocabulary.all_bytes()
        size = len(table)
        for i, data in enumerate(strings):
            pieces = spellings[i]
            if (
                not pieces
                or max(pieces) >= size
                or b"".join([table[piece] for piece in pieces]) != data
            ):
                pieces = self._longest_matches(data)
                is_exact = b"".join([table[piece] for piece in pieces]) == data
                spellings[i] = pieces if is_exact else []
        return spellings

    def _encode_text(self, text: str) -> list[int]:
        pieces: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        data = text.encode()
        vocabulary = self.vocabulary
        if max(pieces, default=0) < vocabulary.size and data == b"".join(
            [vocabulary.token_bytes(piece) for piece in pieces]
        ):
            return pieces
        return self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        table, longest = self.vocabulary.by_bytes, int(self.vocabulary.lengths.max(initial=0))
        pieces: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + longest), at, -1):
                piece = table.get(data[at:end])
                if piece is not None:
                    pieces.append(piece)
                    at = end
                    break
            else:
                at += 1
        return pieces


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
