"""A GGUF file as a checkpoint: llama.cpp's conventions turned into ours."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import CheckpointError

from ..architecture import DecoderConfig
from .checkpoint import SourceFiles, TokenizerFiles
from .gguf_config import config_document, generation_document
from .gguf_file import GgufHeader, read_gguf_header
from .gguf_rope import half_split_rows
from .hf_config import decoder_config
from .stored_checkpoint import StoredCheckpoint, Tensor, match_tensors, refuse_unused
from .stored_tensor import FLOAT_ENCODINGS
from .tensor_names import gguf_name

_FREQUENCY_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path, other_way: str) -> StoredCheckpoint:
    """The checkpoint in a GGUF file; reads the header, and no tensor of the decoder.

    Args: the file, and what to do about a decoder that is not supported.

    Raises:
        CheckpointError: the file is damaged, not a GGUF or not supported.
    """
    header = read_gguf_header(path)
    document = config_document(header, _frequency_factors(header), path.name, other_way)
    config = decoder_config(
        document, path.name, num_tensors=len(header.tensors), other_way=other_way
    )
    names = {name: gguf_name(name) for name in config.tensor_shapes()}
    stored = match_tensors(config, names, header.tensors, path.name)
    unused = header.tensors.keys() - {*names.values(), _FREQUENCY_FACTORS}
    refuse_unused(unused, config, path.name, other_way=other_way)
    is_interleaved = header.fields["general.architecture"] == "llama"
    return StoredCheckpoint(
        path=path,
        config=config,
        source_files=SourceFiles(
            config=document, generation_config=generation_document(header.fields)
        ),
        stored=stored,
        to_canonical=partial(_to_canonical, config=config, is_interleaved=is_interleaved),
        read_tokenizer=partial(_read_tokenizer, header.fields),
    )


def _frequency_factors(header: GgufHeader) -> list[float] | None:
    stored = header.tensors.get(_FREQUENCY_FACTORS)
    if stored is None:
        return None
    if stored.encoding not in FLOAT_ENCODINGS or len(stored.shape) != 1:
        raise CheckpointError(
            f"{stored.path.name}: tensor {stored.name} is stored as {stored.encoding} of shape "
            f"{list(stored.shape)}, it should be a list of {' or '.join(FLOAT_ENCODINGS)}; "
            "get the file again"
        )
    return [float(value) for value in stored.read()]


def _to_canonical(
    name: str, values: Tensor, *, config: DecoderConfig, is_interleaved: bool
) -> Tensor:
    """Half-split rotary rows; the norms of gemma hold the applied factor already."""
    match name.rpartition(".")[2]:
        case "q_proj" | "q_bias" if is_interleaved:
            return half_split_rows(values, config.num_heads)
        case "k_proj" | "k_bias" if is_interleaved:
            return half_split_rows(values, config.num_kv_heads)
    return values


def _read_tokenizer(fields: Mapping[str, Any]) -> TokenizerFiles:
    from ..tokenization.gguf_tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(fields)
