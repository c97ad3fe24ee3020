"""JSON documents of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import CheckpointError, OmniDraftError


def read_object(
    path: Path, *, optional: bool = False, error_type: type[OmniDraftError] = CheckpointError
) -> dict[str, Any]:
    """The object in a file, which may begin with a byte order mark; where `optional`, empty if
    there is no file.

    Raises:
        CheckpointError: or `error_type`; the file is missing, unreadable or no JSON object.
    """
    shown = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        if optional:
            return {}
        raise error_type(f"{shown} is missing; get the whole checkpoint, with its documents")
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise error_type(f"cannot read {shown}: {error.strerror}") from error
    except ValueError as error:
        raise error_type(f"{shown} is not JSON: {error}; get the file again") from error
    except RecursionError as error:
        raise error_type(f"{shown} is nested too deeply; get the file again") from error
    if not isinstance(document, dict):
        raise error_type(f"{shown} is not a JSON object; get the file again")
    return document
