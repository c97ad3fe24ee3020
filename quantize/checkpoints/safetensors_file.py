"""Where the tensors of a safetensors file lie.

The format: the header's length (8 bytes, little-endian), a JSON header with dtype, shape
and byte range of every tensor, then the bytes. The package checks the header, by the rules of
the format; the bytes are read here, since it loads a whole tensor before it can be converted and
needs more than numpy for bf16.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from .file_kind import refuse_foreign
from .stored_tensor import SCALED_ENCODING, StoredTensor

_SHOWN = 160
"""Most characters of the package's own words."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, by its name; reads the header only.

    Raises:
        CheckpointError: the file cannot be read, is not in this format or was cut short.
    """
    from safetensors import SafetensorError, safe_open

    refuse_foreign(path, f"{path.parent.name}/{path.name}")
    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} is cut short or damaged: {_plain(error)}; get the file again ({path})"
        ) from error
    header.pop("__metadata__", None)
    start = 8 + length
    return _with_scales(
        {
            name: StoredTensor(
                name=name,
                path=path,
                offset=start + entry["data_offsets"][0],
                shape=tuple(entry["shape"]),
                encoding=entry["dtype"],
            )
            for name, entry in header.items()
        }
    )


def _with_scales(found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Give whole numbers the scales that lie beside them, `<name>_scale` with one value a row."""
    joined = dict(found)
    for name, stored in found.items():
        scale = found.get(f"{name}_scale")
        if stored.encoding == SCALED_ENCODING and scale and scale.shape == stored.shape[:1]:
            joined[name] = dataclasses.replace(stored, scale=joined.pop(scale.name))
    return joined


def _plain(error: Exception) -> str:
    """The package's reason, short."""
    reason = str(error).removeprefix("Error while deserializing header: ")
    return shown_text(reason, _SHOWN)
