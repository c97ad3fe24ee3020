"""Models built by onnxruntime-genai's builder, taken over as they are."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.manifest import Cache

from .checkpoints.checkpoint import SourceFiles
from .checkpoints.config_fields import ConfigFields
from .checkpoints.json_file import read_object
from .foreign_graph import ForeignGraph
from .tokenization.hf_tokenizer import read_tokenizer

GENAI_CONFIG = "genai_config.json"

_CONFIG_NAMES = {
    "type": "model_type",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
_DECODER_NAMES = {
    "head_size": "head_dim",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_hidden_layers": "num_hidden_layers",
    "num_key_value_heads": "num_key_value_heads",
}
"""Names in `genai_config.json` and in a Hugging Face `config.json`."""


def import_genai_model(model_path: Path, folder: Path) -> ForeignGraph:
    """Copy a builder's graph and its data to ``model.onnx`` in `folder`.

    The head size, which the builder leaves open in the cache's shape, is written into it.

    Args:
        model_path: The builder's output folder.
        folder: Where the graph goes; made if missing.

    Raises:
        CheckpointError: a document or the graph is missing or damaged, or it is no decoder
            with a KV cache of its own, input and output.
        TokenizerError: it has no tokenizer that can be read.
    """
    import onnx

    shown = f"{model_path.name}/{GENAI_CONFIG}"
    model = ConfigFields(read_object(model_path / GENAI_CONFIG), shown).section("model")
    model_fields = ConfigFields(model, f"{shown}: model")
    decoder = model_fields.section("decoder")
    decoder_fields = ConfigFields(decoder, f"{shown}: model.decoder")
    graph = model_path / str(decoder.get("filename"))
    try:
        proto = onnx.load(graph, load_external_data=False)
    except Exception as error:  # protobuf's errors share no base
        raise CheckpointError(
            f"{model_path.name}/{graph.name}, which {GENAI_CONFIG} names, cannot be read "
            f"({' '.join(str(error).split())}): build the model again"
        ) from error
    cache = _fix_cache(proto, model_path.name, _size(decoder_fields, "head_size"))
    folder.mkdir(parents=True, exist_ok=True)
    for location in sorted(_data_files(proto)):
        source = model_path / location
        if Path(location).name != location or not source.is_file():
            raise CheckpointError(f"{model_path.name}/{location} is missing: build the model again")
        shutil.copyfile(source, folder / location)
    onnx.save(proto, folder / "model.onnx")
    config = {hf: model[name] for name, hf in _CONFIG_NAMES.items() if name in model}
    config |= {hf: decoder[name] for name, hf in _DECODER_NAMES.items() if name in decoder}
    tokenizer = read_tokenizer(model_path)
    ends = dict.fromkeys((*_ends(model_fields), *tokenizer.eos_token_ids))
    rows = next(o for o in proto.graph.output if o.name == "logits").type.tensor_type.shape.dim[-1]
    return ForeignGraph(
        exporter="external",
        architecture=str(model.get("type")),
        precision="unknown",
        cache=cache,
        num_logits=rows.dim_value,
        context_length=_size(model_fields, "context_length"),
        source_files=SourceFiles(config=config),
        tokenizer=dataclasses.replace(tokenizer, eos_token_ids=tuple(ends)),
    )


def _size(fields: ConfigFields, name: str) -> int | None:
    return None if fields.get(name) is None else fields.count(name)


def _ends(fields: ConfigFields) -> list[int]:
    """`eos_token_id`, which is one id or several."""
    value = fields.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(
            f"{fields.source}.eos_token_id is {value!r}, it should be one token id or several: "
            "build the model again"
        )
    return ids


def _fix_cache(proto: Any, name: str, head_size: int | None) -> Cache:
    """Write the head size into the cache's shapes; `shared` if attention can write in place."""
    ends = [*proto.graph.input, *proto.graph.output]
    tensors = [v for v in ends if v.name.startswith(("past_key_values.", "present."))]
    names = {v.name for v in tensors}
    rows = [o.type.tensor_type.shape.dim[-1] for o in proto.graph.output if o.name == "logits"]
    if not names or not rows or not rows[0].dim_value:
        raise CheckpointError(
            f"{name} has no past_key_values inputs or no logits of a known size, so the runtime "
            "cannot use it: build it with a KV cache and a language model head"
        )
    for value in tensors:
        dim = value.type.tensor_type.shape.dim[3]
        if not dim.dim_value and head_size is not None:
            dim.dim_value = head_size
    in_place = {
        used
        for node in proto.graph.node
        if node.op_type == "GroupQueryAttention"
        for used in (*node.input, *node.output)
    }
    return "shared" if names <= in_place else "concat"


def _data_files(proto: Any) -> set[str]:
    return {
        entry.value
        for tensor in proto.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
