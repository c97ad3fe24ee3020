"""The header of a GGUF file: metadata as Python values, and where the tensors lie.

The package's own reader keeps an array object for every string of the vocabulary (for 262,144
tokens 11 s and 690 MB); this one gives plain lists. Decoding the blocks is left to the package.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import CheckpointError

from .gguf_package import require_gguf
from .stored_tensor import BLOCK_ENCODINGS, FLOAT_ENCODINGS, StoredTensor, stored_bytes

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 8
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

    def header(self) -> GgufHeader:
        """Everything, in the order of the file."""
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path.name} is a GGUF file of version {version} or of another byte "
                "order; supported are little-endian versions 2 and 3: convert the model again"
            )
        num_tensors, num_fields = self._unpack("QQ")
        fields = {}
        for _ in range(num_fields):
            key = self._string()
            (kind,) = self._unpack("I")
            fields[key] = self._value(kind)
        places = [self._tensor_place() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        return GgufHeader(fields=fields, tensors={t.name: t for t in self._stored(places, start)})

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("IQ")
            if depth == _MAX_NESTING:
                raise self._damaged(f"its metadata nests arrays more than {depth} deep")
            if count > len(self._data):
                raise self._damaged(f"an array of {count} items does not fit into it")
            if item_kind in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[item_kind]}"))
            return [self._value(item_kind, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"its metadata holds a value of unknown type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        raw = self._take(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{raw[:40]!r} in its metadata is not UTF-8") from error

    def _tensor_place(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape (slowest dimension first), encoding and offset in the data part."""
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        if num_dimensions > 8:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = self._unpack(f"{num_dimensions}Q")[::-1]
        kind, offset = self._unpack("IQ")
        return name, shape, _encoding_name(kind), offset

    def _stored(
        self, places: list[tuple[str, tuple[int, ...], str, int]], start: int
    ) -> list[StoredTensor]:
        """The tensors with absolute offsets, each found to lie inside the file."""
        stored = []
        for name, shape, encoding, offset in places:
            size = 0
            if encoding in FLOAT_ENCODINGS + BLOCK_ENCODINGS:
                size = stored_bytes(shape, encoding)
            if start + offset + size > len(self._data):
                raise self._damaged(f"its {len(self._data)} bytes end inside tensor {name}")
            stored.append(
                StoredTensor(
                    name=name,
                    path=self._path,
                    offset=start + offset,
                    shape=shape,
                    encoding=encoding,
                )
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


def _encoding_name(kind: int) -> str:
    """ggml's name of a tensor type, or its number where the package does not know it."""
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"type {kind}"
