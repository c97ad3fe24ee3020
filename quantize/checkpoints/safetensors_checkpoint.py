"""A Hugging Face folder: `config.json`, safetensors in one file or in shards, a tokenizer."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from omnidraft_npu.documents import shown_text
from omnidraft_npu.errors import CheckpointError

from ..architecture import DecoderConfig
from ..tokenization.hf_tokenizer import read_tokenizer
from .checkpoint import SourceFiles
from .file_kind import refuse_foreign
from .hf_config import decoder_config
from .json_file import read_object
from .safetensors_file import read_header
from .stored_checkpoint import StoredCheckpoint, Tensor, match_tensors, refuse_unused
from .stored_tensor import FLOAT_ENCODINGS, StoredTensor, have_equal_values
from .tensor_names import hugging_face_name

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Read by others later; that a download of one failed is best found first.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.jinja",
)

# Where the decoder and its head lie: text models, multimodal ones old and new, bare decoders.
_PLACES = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
    ("", "lm_head.weight"),
)


def open_folder(folder: Path, other_way: str) -> StoredCheckpoint:
    """The checkpoint in a folder; reads the documents and the headers, no tensor.

    Args: the folder, and what to do about a decoder that is not supported.

    Raises:
        CheckpointError: something is missing, damaged or not supported.
    """
    for name in _TEXT_FILES:
        refuse_foreign(folder / name, f"{folder.name}/{name}")
    document = read_object(folder / "config.json")
    found = _tensors_of(folder)
    config = decoder_config(
        document, f"{folder.name}/config.json", num_tensors=len(found), other_way=other_way
    )
    return StoredCheckpoint(
        path=folder,
        config=config,
        source_files=SourceFiles(
            config=document,
            generation_config=read_object(folder / "generation_config.json", optional=True),
        ),
        stored=_match(config, found, folder.name, other_way),
        to_canonical=partial(_to_canonical, adds_one=config.has_sandwich_norms),
        read_tokenizer=partial(read_tokenizer, folder),
    )


def _tensors_of(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by its name in the files."""
    if (folder / _SINGLE).is_file():
        return read_header(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)
    index = read_object(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(
            f"{folder.name}/{_INDEX} has no weight_map from tensors to files; get the file again"
        )
    found: dict[str, StoredTensor] = {}
    there = {path.name for path in folder.iterdir() if path.is_file()}
    for shard in sorted(set(index.values())):
        if shard not in there:
            raise CheckpointError(
                f"{folder.name}: shard {shown_text(shard)} is missing, {_INDEX} names it; "
                "get the checkpoint again"
            )
        held = read_header(folder / shard)
        if repeated := found.keys() & held.keys():
            name = min(repeated)
            raise CheckpointError(
                f"{folder.name}: tensor {shown_text(name)} is in {found[name].path.name} and in "
                f"{shown_text(shard)}; get the checkpoint again"
            )
        found |= held
    return found


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return CheckpointError(
            f"{folder.name} has {shards[0]} but neither {_SINGLE} nor {_INDEX}; get the checkpoint "
            "again"
        )
    if pickled:
        return CheckpointError(
            f"{folder.name} holds pickled weights only ({pickled[0]}), which can run code when "
            "they are loaded: convert them to safetensors (save_pretrained of transformers does)"
        )
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return CheckpointError(
            f"{folder.name} holds no safetensors but a GGUF file; give it: {folder / gguf[0]}"
        )
    return CheckpointError(
        f"{folder.name} has neither {_SINGLE} nor {_INDEX}; get the checkpoint again"
    )


def _match(
    config: DecoderConfig, found: Mapping[str, StoredTensor], source: str, other_way: str
) -> dict[str, StoredTensor]:
    """The stored tensor of every canonical name."""
    prefix, head = next(
        ((p, h) for p, h in _PLACES if f"{p}layers.0.input_layernorm.weight" in found), _PLACES[0]
    )
    names = {
        name: prefix + hugging_face_name(name, has_sandwich_norms=config.has_sandwich_norms)
        for name in config.tensor_shapes()
        if name != "lm_head"
    }
    names["lm_head"] = head
    if config.has_tied_head and names["embed_tokens"] not in found:
        names["embed_tokens"] = head
    matched = match_tensors(config, names, found, source)
    if config.has_tied_head and head in found:
        _require_equal(matched["embed_tokens"], found[head], source)
    own = {name for name in found if name.startswith((prefix, head.removesuffix("weight")))}
    unused = own - set(names.values())
    weights = (name for name in unused if not name.endswith("inv_freq"))
    refuse_unused(weights, config, source, other_way=other_way)
    return matched


def _require_equal(embedding: StoredTensor, head: StoredTensor, source: str) -> None:
    """A head that is tied and nevertheless stored is one of the rare reasons to read early."""
    if head.encoding not in FLOAT_ENCODINGS or not have_equal_values(embedding, head):
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true but {head.name} differs from "
            f"{embedding.name}; set it to false in config.json if the head is the one that counts"
        )


def _to_canonical(name: str, values: Tensor, *, adds_one: bool) -> Tensor:
    """Gemma stores its norms as the difference from one."""
    return values + np.float32(1.0) if adds_one and name.endswith("norm") else values
