"""How far learning is: an adapter that is still under training, kept between processes."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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

    parent: int = BASE
    """The adapter version that training went on from."""
    newest: int = 0
    """Number of the newest example that was learned from."""
    num_examples: int = 0
    """Learned from since the parent."""
    num_updates: int = 0
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
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return Progress(), {}
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format_version") != str(FORMAT_VERSION):
                raise ValueError(f"its format version is {metadata.get('format_version')}")
            if json.loads(metadata["key"]) != dataclasses.asdict(key):
                return Progress(), {}
            progress = Progress(**json.loads(metadata["progress"]))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("learning goes on from the adapter in use: %s is damaged (%s)", path, error)
        return Progress(), {}
    return progress, state
