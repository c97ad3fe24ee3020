"""SentencePiece `tokenizer.model` files: the pieces, and what is done to a text before merging."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnidraft_npu.errors import TokenizerError

from .tokenizer_documents import Piece, PieceKind

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE = 3
_BPE = 2
_CHARACTER_MAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4

_Value = int | bytes


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """A BPE model whose text is not rewritten, but for spaces."""

    pieces: tuple[Piece, ...]
    add_space_prefix: bool
    """Whether a space is put before every text."""


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The model in a `tokenizer.model` file.

    Raises:
        TokenizerError: the file is damaged, is not BPE, or rewrites its text.
    """
    try:
        data = path.read_bytes()
        pieces, trainer, normalizer = _parts(data)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise TokenizerError(
            f"{path} is not a SentencePiece model or is damaged: get the file again"
        ) from error
    if not pieces:
        raise TokenizerError(f"{path} holds no pieces: get the file again")
    if trainer.get(_MODEL_TYPE) != _BPE:
        raise TokenizerError(
            f"{path} is a SentencePiece model of another kind than BPE, which is not supported: "
            "save a fast tokenizer (tokenizer.json) with transformers"
        )
    if normalizer.get(_CHARACTER_MAP) or normalizer.get(_EXTRA_SPACES, 1):
        raise TokenizerError(
            f"{path} rewrites its text (a character map or the removal of spaces), which is not "
            "supported: save a fast tokenizer (tokenizer.json) with transformers"
        )
    return SentencePieceModel(
        pieces=tuple(pieces), add_space_prefix=bool(normalizer.get(_DUMMY_PREFIX, 1))
    )


def _parts(data: bytes) -> tuple[list[Piece], dict[int, _Value], dict[int, _Value]]:
    pieces: list[Piece] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            pieces.append(_piece(dict(_fields(_as_bytes(value)))))
        elif number == _TRAINER:
            trainer = dict(_fields(_as_bytes(value)))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(_as_bytes(value)))
    return pieces, trainer, normalizer


def _piece(fields: dict[int, _Value]) -> Piece:
    (score,) = struct.unpack("<f", _as_bytes(fields.get(_SCORE, bytes(4))))
    if math.isnan(score):
        raise ValueError("a score that is no number")
    return Piece(
        text=_as_bytes(fields[_TEXT]).decode(),
        kind=PieceKind(int(fields.get(_KIND, PieceKind.NORMAL))),
        score=score,
    )


def _as_bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"a number where bytes should be: {value}")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Number and value of every field of a protobuf message; fixed-size values as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[wire]
        if at + size > len(data):
            raise ValueError(f"field {number} ends at {at + size}, after the end at {len(data)}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
