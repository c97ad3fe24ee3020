"""How far learning is: an adapter that is still under training, kept between processes."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from omnidraft_npu.array_files import read_arrays
from omnidraft_npu.documents import Count, convert_document, parse_document
from omnidraft_npu.errors import BundleError
from omnidraft_npu.files import private_folder, write_safetensors
from omnidraft_npu.replay import TRAINING_FILE

from .adamw import Tensors
from .adapter_files import AdapterKey
from .adapter_store import BASE

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What has been learned from."""

    parent: Count = BASE
    """The adapter version that training went on from."""
    newest: Count = 0
    """Number of the newest example that was learned from."""
    num_examples: Count = 0
    """Learned from since the parent."""
    num_updates: Count = 0
    """Steps of the optimiser since the parent."""


def training_path(replay_folder: Path) -> Path:
    """Where the state lies: beside the examples, and forgotten with them."""
    return replay_folder / TRAINING_FILE


def write_training(path: Path, progress: Progress, state: Tensors, key: AdapterKey) -> None:
    """Write progress and the optimiser's state, atomically.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "progress": json.dumps(dataclasses.asdict(progress)),
        "key": json.dumps(dataclasses.asdict(key)),
    }
    private_folder(path.parent)
    write_safetensors(path, state, metadata, private=True)


def read_training(
    path: Path, key: AdapterKey
) -> tuple[Progress, dict[str, npt.NDArray[np.float32]]]:
    """What `write_training` wrote, with an empty state where that is of no use.

    Of no use is what is missing, damaged (said), or was trained for another drafter, target or
    rank.
    """
    if not path.is_file():
        return Progress(), {}
    try:
        state, metadata = read_arrays(path, None, advice="delete it", what="a state of learning")
        marks = convert_document(metadata, _Marks, f"{path}: its metadata", advice="delete it")
        where = f"{path}: its metadata"
        made_for = parse_document(marks.key, dict[str, Any], where, advice="delete it")
        if made_for != dataclasses.asdict(key):
            return Progress(), {}
        progress = parse_document(
            marks.progress, Progress, where, advice="delete it", is_closed=True
        )
    except BundleError as error:
        logger.warning("learning goes on from the adapter in use: %s", error)
        return Progress(), {}
    return progress, state


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """The file's metadata."""

    format_version: Literal["1"]
    key: str
    progress: str
