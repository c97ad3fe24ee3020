"""The package that decodes the blocks of GGUF files; not every installation has it."""

from importlib.util import find_spec

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.extras import install_hint


def require_gguf() -> None:
    """Pass if the package `gguf` is installed.

    Raises:
        CheckpointError: it is not; says how to get it.
    """
    if find_spec("gguf") is None:
        raise CheckpointError(
            f"reading GGUF files needs the package gguf: {install_hint('export')}"
        )
