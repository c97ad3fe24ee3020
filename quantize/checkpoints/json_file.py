"""JSON documents of a checkpoint."""

from pathlib import Path
from typing import Any

from omnidraft_npu.documents import read_document
from omnidraft_npu.errors import CheckpointError, OmniDraftError

from .file_kind import refuse_foreign

_MAX_BYTES = 64 * 2**20
"""A tokenizer's settings repeat its added tokens; an index names every tensor."""


def read_object(
    path: Path, *, optional: bool = False, error_type: type[OmniDraftError] = CheckpointError
) -> dict[str, Any]:
    """The object in a file, which may begin with a byte order mark; where `optional`, empty if
    there is no file.

    Raises:
        CheckpointError: or `error_type`; the file is missing, unreadable or no JSON object.
    """
    shown = f"{path.parent.name}/{path.name}"
    if not path.exists():
        if optional and not path.is_symlink():
            return {}
        raise error_type(f"{shown} is missing; get the whole checkpoint, with its documents")
    refuse_foreign(path, shown, error_type=error_type)
    return read_document(
        path,
        dict[str, Any],
        error=error_type,
        advice="get the file again",
        shown=shown,
        max_bytes=_MAX_BYTES,
    )
