"""Real model files; tests that need one skip where it is absent."""

import os
from pathlib import Path

import pytest

from omnidraft_npu.store.local import stored_path

_STORED = {"smollm2.gguf": "smollm2-135m", "gemma3-270m.gguf": "gemma3-270m"}


def real_model(name: str) -> Path:
    """``smollm2.gguf`` or ``gemma3-270m.gguf``, from OMNIDRAFT_TEST_MODELS or the local store."""
    folder = os.environ.get("OMNIDRAFT_TEST_MODELS")
    if folder and (Path(folder) / name).is_file():
        return Path(folder) / name
    path = stored_path(_STORED[name])
    if path is None:
        pytest.skip(f"{name} is not here: omnidraft-npu pull {_STORED[name]}")
    return path
