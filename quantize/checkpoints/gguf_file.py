"""The header of a GGUF file: metadata as Python values, and where the tensors lie.

The package's own reader keeps an array object for every string of the vocabulary (for 262,144
tokens 11 s and 690 MB); this one gives plain lists. Decoding the blocks is left to the package.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from .file_kind import refuse_foreign
from .gguf_package import require_gguf
from .stored_tensor import (
    BLOCK_ENCODINGS,
    FLOAT_ENCODINGS,
    StoredTensor,
    fits_blocks,
    stored_bytes,
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 8
_MAX_DIMENSIONS = 4
"""As in ggml."""
_MAX_ITEMS = 2**22
"""Of all arrays, fields and tensors together; a vocabulary of 262,144 tokens takes 1.5 million.
Without a bound a file of 200 MB takes gigabytes of memory as Python values."""
_MAX_STRING = 2**24
"""Bytes; chat templates have some thousands."""
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """All of a GGUF file but its tensors' bytes."""

    fields: dict[str, Any]
    """Metadata; arrays are lists."""
    tensors: dict[str, StoredTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata and tensor places of a GGUF file of version 2 or 3, little-endian.

    Raises:
        CheckpointError: the file is not such a GGUF, or ends early; or the package that decodes
            its blocks is not installed.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                refuse_foreign(path, path.name, suffix=".gguf")
                raise CheckpointError(
                    f"{path.name} is not a GGUF file (it does not begin with 'GGUF'); give a "
                    "GGUF file or a Hugging Face folder"
                )
            require_gguf()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """A position in the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = len(_MAGIC)
        self._items_left = _MAX_ITEMS

    def header(self) -> GgufHeader:
        """Everything, in the order of the file."""
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path.name} is a GGUF file of version {version} or of another byte "
                "order; supported are little-endian versions 2 and 3: convert the model again"
            )
        num_tensors, num_fields = self._unpack("QQ")
        self._count(num_tensors, "tensors")
        self._count(num_fields, "fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            if key in fields:
                raise self._damaged(f"its metadata has {shown_text(key)} twice")
            (kind,) = self._unpack("I")
            fields[key] = self._value(kind)
        places = [self._tensor_place() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r:.40}, not a power of two")
        start = -(-self._position // alignment) * alignment
        tensors = self._stored(places, start, alignment)
        return GgufHeader(fields=fields, tensors=tensors)

    def _count(self, count: int, what: str) -> None:
        """Take some of the items that a header may hold."""
        self._items_left -= count
        if self._items_left < 0:
            raise CheckpointError(
                f"{self._path.name} claims {count} {what} in its header, where {_MAX_ITEMS} items "
                "are the most that is read; it is damaged or no language model, get another file"
            )

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("IQ")
            if depth == _MAX_NESTING:
                raise self._damaged(f"its metadata nests arrays more than {depth} deep")
            self._count(count, "items of an array")
            if item_kind in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[item_kind]}"))
            return [self._value(item_kind, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"its metadata holds a value of unknown type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if length > _MAX_STRING:
            raise self._damaged(f"its metadata has a string of {length} bytes")
        raw = self._take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{raw[:40]!r} in its metadata is not UTF-8") from error

    def _tensor_place(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape (slowest dimension first), encoding and offset in the data part."""
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {shown_text(name)} has {num_dimensions} dimensions")
        shape = self._unpack(f"{num_dimensions}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, shape, _encoding_name(kind), offset

    def _stored(
        self, places: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
    ) -> dict[str, StoredTensor]:
        """The tensors with absolute offsets: one after the other, each inside the file."""
        stored: dict[str, StoredTensor] = {}
        expected: int | None = 0
        for name, shape, encoding, offset in places:
            shown = shown_text(name)
            if name in stored:
                raise self._damaged(f"it has tensor {shown} twice")
            size = _stored_bytes(shape, encoding)
            if size is None:
                size, expected = 0, None
            elif size < 0:
                raise self._damaged(f"tensor {shown} of shape {list(shape)} is no {encoding}")
            if expected is not None:
                if offset != expected:
                    raise self._damaged(f"tensor {shown} lies at {offset} instead of {expected}")
                expected = -(-(offset + size) // alignment) * alignment
            if start + offset + size > len(self._data):
                raise self._damaged(f"its {len(self._data)} bytes end inside tensor {shown}")
            stored[name] = StoredTensor(
                name=name, path=self._path, offset=start + offset, shape=shape, encoding=encoding
            )
        return stored

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise self._damaged(f"its {len(self._data)} bytes end inside the header")
        raw = self._data[self._position : end]
        self._position = end
        return raw

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path.name} is cut short or damaged: {what}; get the file again"
        )


def _stored_bytes(shape: tuple[int, ...], encoding: str) -> int | None:
    """Bytes of a tensor; -1 where its rows are no whole blocks, None for one that is not read."""
    if encoding not in FLOAT_ENCODINGS + BLOCK_ENCODINGS:
        return None
    return stored_bytes(shape, encoding) if fits_blocks(shape, encoding) else -1


def _encoding_name(kind: int) -> str:
    """ggml's name of a tensor type, or its number where the package does not know it."""
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"
