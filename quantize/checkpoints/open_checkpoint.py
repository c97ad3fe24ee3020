"""The one way to open a checkpoint, whatever its format."""

from pathlib import Path

from omnidraft_npu.errors import CheckpointError

from .checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, told by its contents: a Hugging Face folder or a GGUF file.

    Opening reads documents, metadata and headers, and no tensor.

    Raises:
        CheckpointError: there is none, or it is damaged or not supported.
    """
    if path.is_dir():
        inside = sorted(path.glob("*.gguf"))
        if inside and not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path.name} has no config.json but GGUF files; give one of them: {inside[0]}"
            )
        from .safetensors_checkpoint import open_folder

        return open_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give a Hugging Face folder or a GGUF file")
    from .gguf_checkpoint import open_gguf

    return open_gguf(path)
