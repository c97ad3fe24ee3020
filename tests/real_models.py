"""Real model files; tests that need one skip where it is absent."""

import os
from pathlib import Path

import pytest


def real_model(name: str) -> Path:
    """``smollm2.gguf`` or ``gemma3-270m.gguf`` in the folder OMNIDRAFT_TEST_MODELS names."""
    folder = os.environ.get("OMNIDRAFT_TEST_MODELS")
    path = Path(folder or "") / name
    if not folder or not path.is_file():
        pytest.skip(f"{name} is not in the folder that OMNIDRAFT_TEST_MODELS names")
    return path
