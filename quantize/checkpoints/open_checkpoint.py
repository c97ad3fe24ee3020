"""The one way to open a checkpoint, whatever its format."""

import re
from pathlib import Path

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from .checkpoint import Checkpoint
from .json_file import read_object

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_ADAPTER = "adapter_config.json"


def open_checkpoint(path: Path, *, other_way: str | None = None) -> Checkpoint:
    """The checkpoint at `path`, told by its contents: a Hugging Face folder or a GGUF file.

    Opening reads documents, metadata and headers, and no tensor.

    Args:
        path: the folder or file.
        other_way: what to do about a decoder that is not supported; None for the exporter that
            takes any.

    Raises:
        CheckpointError: there is none, or it is damaged or not supported.
    """
    if path.is_dir():
        if (path / _ADAPTER).exists():
            raise _adapter(path)
        if not (path / "config.json").exists():
            raise CheckpointError(_without_config(path))
        from .config_fields import TRY_OPTIMUM
        from .safetensors_checkpoint import open_folder

        return open_folder(path, other_way or TRY_OPTIMUM)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a Hugging Face folder or a GGUF file")
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not a regular file; give a Hugging Face folder or a GGUF file"
        )
    from .gguf_checkpoint import open_gguf
    from .gguf_config import USE_FOLDER

    return open_gguf(path, other_way or USE_FOLDER)


def _adapter(folder: Path) -> CheckpointError:
    """Also where a model lies beside it: transformers then loads the model with the adapter."""
    base = read_object(folder / _ADAPTER).get("base_model_name_or_path")
    of = f" of {shown_text(base)}" if isinstance(base, str) and base else ""
    return CheckpointError(
        f"{folder.name} holds a PEFT adapter{of}, not a model of its own: merge it first "
        "(merge_and_unload of peft, then save_pretrained) and give the result"
    )


def _without_config(folder: Path) -> str:
    """What a folder without a `config.json` holds, and what to give instead."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    shown = folder.name or str(folder)
    if gguf := [name for name in names if name.endswith(".gguf")]:
        whole = [n for n in gguf if not _SHARD.fullmatch(n) and not n.startswith("mmproj")]
        if whole:
            return (
                f"{shown} has no config.json but GGUF files; give one of them: {folder / whole[0]}"
            )
        if shard := _SHARD.fullmatch(gguf[0]):
            return (
                f"{shown} holds a GGUF file in {int(shard[3])} parts: join them with "
                f"llama-gguf-split --merge {folder / gguf[0]} {folder / shard[1]}.gguf, and give "
                "the result"
            )
        return f"{shown} holds no model but {gguf[0]}; give the model's GGUF file"
    if "manifest.json" in names:
        return f"{shown} is a bundle, or a part of one; give the checkpoint it was exported from"
    if onnx := [name for name in names if name.endswith((".onnx", ".ort"))]:
        return f"{shown} holds an ONNX graph ({onnx[0]}) and no config.json; give the checkpoint"
    if "params.json" in names or "consolidated.safetensors" in names:
        return (
            f"{shown} holds a model in its maker's own format; get the one for transformers, with "
            "a config.json and safetensors"
        )
    if "README.md" in names and len(names) == 1:
        return f"{shown} holds a README.md only; get the whole checkpoint, with its documents"
    if inside := sorted(entry.parent for entry in folder.glob("*/config.json")):
        return f"{shown} has no config.json, a folder in it has one; give {inside[0]}"
    return f"{shown}/config.json is missing; get the whole checkpoint, with its documents"
