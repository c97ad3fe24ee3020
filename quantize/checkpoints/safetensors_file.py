"""Where the tensors of a safetensors file lie.

The format: the header's length (8 bytes, little-endian), a JSON header with dtype, shape
and byte range of every tensor, then the bytes. Read here rather than through the package,
which loads a whole tensor before it can be converted and needs more than numpy for bf16.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import CheckpointError

from .stored_tensor import FLOAT_ENCODINGS, SCALED_ENCODING, StoredTensor, stored_bytes

_MAX_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by its name; reads the header only.

    Raises:
        CheckpointError: the file cannot be read, is not in this format or was cut short.
    """
    try:
        with path.open("rb") as file:
            file_size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 + length or length > _MAX_HEADER_BYTES:
                raise _damaged(path, f"its {file_size} bytes end inside the header")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    header.pop("__metadata__", None)
    start = 8 + length
    found = {name: _stored(path, name, entry, start, file_size) for name, entry in header.items()}
    return _with_scales(found)


def _with_scales(found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Give whole numbers the scales that lie beside them, `<name>_scale` with one value a row."""
    joined = dict(found)
    for name, stored in found.items():
        scale = found.get(f"{name}_scale")
        if stored.encoding == SCALED_ENCODING and scale and scale.shape == stored.shape[:1]:
            joined[name] = dataclasses.replace(stored, scale=joined.pop(scale.name))
    return joined


def _stored(path: Path, name: str, entry: Any, start: int, file_size: int) -> StoredTensor:
    """One entry of the header, with its byte range checked."""
    try:
        shape = tuple(int(size) for size in entry["shape"])
        encoding = str(entry["dtype"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, f"its header says nothing usable of tensor {name}") from error
    if start + end > file_size:
        raise _damaged(path, f"its {file_size} bytes end before tensor {name}")
    if begin < 0 or min(shape, default=1) < 0:
        raise _damaged(path, f"its header says nothing usable of tensor {name}")
    is_known = encoding in (*FLOAT_ENCODINGS, SCALED_ENCODING)
    if is_known and stored_bytes(shape, encoding) != end - begin:
        raise _damaged(path, f"tensor {name} has {end - begin} bytes for shape {list(shape)}")
    return StoredTensor(name=name, path=path, offset=start + begin, shape=shape, encoding=encoding)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is cut short or damaged: {what}; get the file again ({path})"
    )
