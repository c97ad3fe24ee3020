"""Hugging Face folders that transformers wrote, whole and damaged."""

import json
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.quantize.checkpoints.hf_config import decoder_config
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.checkpoints.tensor_names import hugging_face_name

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

LAYER = "model.layers.0"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A llama of two files and more, to damage."""
    tiny_model("llama").save_pretrained(tmp_path / "tiny", max_shard_size="100KB")
    return tmp_path / "tiny"


@pytest.fixture
def single(tmp_path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def rewrite(folder: Path, change) -> None:
    """Put what `change` makes of a folder's tensors (in one file) in their place."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def reconfigure(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_a_sharded_folder_equals_the_models(tmp_path, architecture, dtype):
    model = tiny_model(architecture).to(FLOATS[dtype])
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)

    inner = model.model
    one = 1.0 if architecture == "gemma3_text" else 0.0
    last = inner.layers[-1]
    where = f"layers.{len(inner.layers) - 1}"
    expected = {
        "embed_tokens": inner.embed_tokens.weight,
        "final_norm": inner.norm.weight.float() + one,
        f"{where}.input_norm": last.input_layernorm.weight.float() + one,
        f"{where}.q_proj": last.self_attn.q_proj.weight,
        f"{where}.k_proj": last.self_attn.k_proj.weight,
        f"{where}.v_proj": last.self_attn.v_proj.weight,
        f"{where}.o_proj": last.self_attn.o_proj.weight,
        f"{where}.gate_proj": last.mlp.gate_proj.weight,
        f"{where}.up_proj": last.mlp.up_proj.weight,
        f"{where}.down_proj": last.mlp.down_proj.weight,
    }
    if not model.config.tie_word_embeddings:
        expected["lm_head"] = model.lm_head.weight
    if architecture == "qwen2":
        expected |= {f"{where}.{n}_bias": getattr(last.self_attn, f"{n}_proj").bias for n in "qkv"}
    if architecture in ("qwen3", "gemma3_text"):
        for n in "qk":
            expected[f"{where}.{n}_norm"] = (
                getattr(last.self_attn, f"{n}_norm").weight.float() + one
            )
    if architecture == "gemma3_text":
        expected |= {
            f"{where}.post_attention_norm": last.post_attention_layernorm.weight.float() + one,
            f"{where}.mlp_norm": last.pre_feedforward_layernorm.weight.float() + one,
            f"{where}.post_mlp_norm": last.post_feedforward_layernorm.weight.float() + one,
        }
    else:
        expected[f"{where}.mlp_norm"] = last.post_attention_layernorm.weight

    of_last = {n for n in checkpoint.config.tensor_shapes() if n.startswith(where)}
    assert of_last <= expected.keys()
    for name, values in expected.items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == np.float32
        np.testing.assert_array_equal(tensor, values.detach().float().numpy(), err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_and_untied_heads_are_told_apart(tmp_path, architecture, is_tied):
    model = tiny_model(architecture, tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    shapes = checkpoint.config.tensor_shapes()
    assert ("lm_head" in shapes) is not is_tied
    for name, shape in shapes.items():
        assert checkpoint.tensor(name).shape == shape


def test_biases_of_llama_are_read(tmp_path):
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    layer = model.model.layers[0]
    for name, values in {
        "layers.0.o_bias": layer.self_attn.o_proj.bias,
        "layers.0.k_bias": layer.self_attn.k_proj.bias,
        "layers.0.gate_bias": layer.mlp.gate_proj.bias,
        "layers.0.down_bias": layer.mlp.down_proj.bias,
    }.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values.detach().numpy())


def test_the_documents_are_handed_on_as_they_are(single):
    (single / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    checkpoint = open_checkpoint(single)

    assert checkpoint.path == single
    assert checkpoint.source_files.config == json.loads((single / "config.json").read_text())
    assert checkpoint.source_files.generation_config == {"eos_token_id": [2, 7]}


def test_a_tied_head_that_is_stored_too_must_be_a_copy(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    embed = "model.embed_tokens.weight"

    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[embed].clone()})
    assert "lm_head" not in open_checkpoint(tmp_path).config.tensor_shapes()

    rewrite(
        tmp_path,
        lambda tensors: (
            tensors
            | {embed: tensors[embed].bfloat16().float()}
            | {"lm_head.weight": tensors[embed].bfloat16()}
        ),
    )
    assert "lm_head" not in open_checkpoint(tmp_path).config.tensor_shapes()

    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[embed] + 1})
    refused(tmp_path, "tie_word_embeddings is true but lm_head.weight differs")


def test_a_tied_head_may_be_stored_instead_of_the_embedding(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {"lm_head.weight": tensors.pop("model.embed_tokens.weight")} | tensors,
    )

    np.testing.assert_array_equal(
        open_checkpoint(tmp_path).tensor("embed_tokens"), model.lm_head.weight.detach().numpy()
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma_is_read(tmp_path, prefix):
    model = tiny_model("gemma3_text")
    model.save_pretrained(tmp_path / "text")
    shutil.copytree(tmp_path / "text", tmp_path / "both")
    rewrite(
        tmp_path / "both",
        lambda tensors: (
            {f"{prefix}{name.removeprefix('model.')}": values for name, values in tensors.items()}
            | {"vision_tower.vision_model.post_layernorm.weight": torch.ones(3)}
        ),
    )
    text = json.loads((tmp_path / "text/config.json").read_text())
    (tmp_path / "both/config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    whole, part = open_checkpoint(tmp_path / "both"), open_checkpoint(tmp_path / "text")

    assert whole.config == part.config
    for name in part.config.tensor_shapes():
        np.testing.assert_array_equal(whole.tensor(name), part.tensor(name))


def test_rotary_buffers_of_old_checkpoints_are_left_out(single):
    buffer = {f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(single, lambda tensors: tensors | buffer)

    assert open_checkpoint(single).tensor("layers.0.q_proj").shape == (64, 64)


def test_opening_reads_no_tensor_and_reading_one_reads_no_other(single):
    """Weights that are NaN everywhere but in one tensor."""
    kept = f"{LAYER}.mlp.up_proj.weight"
    rewrite(
        single,
        lambda tensors: {
            name: values if name == kept else torch.full_like(values, float("nan"))
            for name, values in tensors.items()
        },
    )
    checkpoint = open_checkpoint(single)

    assert np.isfinite(checkpoint.tensor("layers.0.up_proj")).all()
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight holds NaN"
    ):
        checkpoint.tensor("layers.0.down_proj")


@pytest.mark.parametrize("num_layers", [4, 64])
def test_memory_of_reading_does_not_grow_with_the_model(tmp_path, num_layers):
    """Shards of zeros with nothing on disk: 2 GB of bf16 with 64 layers, 8 layers a shard."""
    big_shards(tmp_path, num_layers)
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(tmp_path)
        _, opening = tracemalloc.get_traced_memory()
        size = checkpoint.tensor(f"layers.{num_layers - 1}.up_proj").nbytes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert opening < 5e6
    assert size < peak < size + 20e6


def big_shards(folder: Path, num_layers: int) -> None:
    """A checkpoint of the shape of a model with `hidden_size` 1,024, as sparse files."""
    tiny_model("llama").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    reconfigure(
        folder, hidden_size=1024, intermediate_size=4096, head_dim=256, num_hidden_layers=num_layers
    )
    config = decoder_config(json.loads((folder / "config.json").read_text()), "big")
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in config.tensor_shapes().items():
        if name == "lm_head":
            stored = "lm_head.weight"
        else:
            stored = "model." + hugging_face_name(name, has_sandwich_norms=False)
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        shards.setdefault(f"model-{layer // 8}.safetensors", {})[stored] = shape
    weight_map = {}
    for shard, shapes in shards.items():
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = shard
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_path_without_a_checkpoint_is_refused(tmp_path, single):
    refused(tmp_path / "nothing", "does not exist")
    refused(single / "config.json", "is a JSON document, no model: give the folder")
    (single / "config.json").unlink()
    refused(single, r"tiny/config\.json is missing")


def test_a_damaged_configuration_is_refused(single):
    nested = "[" * 100_000 + "]" * 100_000
    for text, message in {
        "{": "is not JSON",
        "[]": "must be an object",
        nested: "nested over 100 levels deep|is not JSON",
    }.items():
        (single / "config.json").write_text(text)
        refused(single, message)


def test_documents_may_begin_with_a_byte_order_mark(single):
    path = single / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert open_checkpoint(single).config.architecture == "llama"


def test_a_claim_of_endless_layers_is_refused(single):
    reconfigure(single, num_hidden_layers=2**31 - 1)
    refused(single, "num_hidden_layers is 2147483647, but the checkpoint has")


def test_an_unknown_architecture_names_what_is_supported(single):
    reconfigure(single, model_type="gpt2")
    refused(single, "'gpt2' is not supported; supported are llama.*--exporter optimum")


def test_a_shard_that_the_index_names_must_be_there(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    (folder / shard).unlink()
    refused(folder, f"shard {shard} is missing")


@pytest.mark.parametrize("value", [3, ["model.safetensors"], None])
def test_an_index_must_name_files(folder, value):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = value
    path.write_text(json.dumps(index))
    refused(folder, "no weight_map from tensors to files")


def test_an_index_cannot_leave_the_folder(folder):
    path = folder / "model.safetensors.index.json"
    shutil.copy(next(folder.glob("*.safetensors")), folder.parent / "outside.safetensors")
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "../outside.safetensors"
    path.write_text(json.dumps(index))
    refused(folder, r"shard \.\./outside\.safetensors is missing")


def test_a_shard_cut_at_any_place_is_said_to_be_cut(single):
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for length in [1, 5, 8, 100, *range(2_000, len(whole), 40_000), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(single, "is cut short or damaged")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [64], "data_offsets": [0, 255]},
        {"dtype": "F32", "shape": [-64], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [64], "data_offsets": [-4, 252]},
        {"dtype": "F32", "shape": [64]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": "64", "data_offsets": [0, 0, 0]},
        "nothing",
    ],
)
def test_a_header_that_contradicts_itself_is_refused(single, entry):
    text = json.dumps({"model.norm.weight": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(256)
    (single / "model.safetensors").write_bytes(content)
    refused(single, "is cut short or damaged")


def test_a_header_nested_too_deeply_is_refused(single):
    text = b"[" * 100_000 + b"]" * 100_000
    (single / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    refused(single, "is cut short or damaged")


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [0, 8]}},
        {"a": F32 | {"data_offsets": [0, 8]}, "b": F32 | {"data_offsets": [4, 12]}},
        {"a": F32 | {"data_offsets": [0, 8]}},
        {"a": F32 | {"data_offsets": [8, 16]}},
        {"a": F32 | {"data_offsets": [8, 0]}, "b": F32 | {"data_offsets": [8, 16]}},
        {"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [2**33, 2**33], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F31", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"a": 1}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": []},
        {"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 16]}},
        [],
    ],
)
def test_a_header_against_the_rules_of_the_format_is_refused(single, header):
    """Tensors overlap, leave holes, or are not what the header is written for."""
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(16)
    (single / "model.safetensors").write_bytes(content)
    refused(single, "is cut short or damaged")


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_a_header_of_impossible_length_is_refused(single, length):
    with (single / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(200_000_000)
    refused(single, "is cut short or damaged")


def test_numbers_of_thousands_of_digits_take_no_time(single):
    """Python turns each of them into a number, in time that grows with the square of its size."""
    text = b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,16]}}' % b",".join(
        [b"9" * 4000] * 8000
    )
    (single / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    started = time.perf_counter()
    refused(single, "is cut short or damaged")
    assert time.perf_counter() - started < 5


def test_a_tensor_in_two_shards_is_refused(folder):
    shards = sorted(folder.glob("*.safetensors"))
    tensors = load_file(shards[0])
    name = min(tensors)
    save_file(load_file(shards[1]) | {name: tensors[name] + 1}, shards[1])
    refused(folder, f"tensor {name} is in {shards[0].name} and in {shards[1].name}")


def test_shards_without_an_index_are_named(folder):
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, r"has model-00001-of-.* but neither model\.safetensors nor")


def test_a_missing_tensor_is_named(single):
    rewrite(
        single,
        lambda tensors: {n: t for n, t in tensors.items() if n != f"{LAYER}.mlp.gate_proj.weight"},
    )
    refused(single, r"model\.layers\.0\.mlp\.gate_proj\.weight is missing, of shape \[96, 64\]")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(single):
    reconfigure(single, vocab_size=161)
    refused(single, r"embed_tokens\.weight has shape \[160, 64\].*asks for \[161, 64\]")


def test_a_tensor_without_a_place_in_the_decoder_is_refused(single):
    rewrite(single, lambda tensors: tensors | {f"{LAYER}.self_attn.q_norm.weight": torch.ones(16)})
    refused(single, r"self_attn\.q_norm\.weight has no place in a llama decoder")


def test_an_encoding_that_is_not_read_is_named(single):
    name = f"{LAYER}.mlp.up_proj.weight"
    rewrite(single, lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)})
    refused(single, r"up_proj\.weight is stored as F8_E4M3, which is not supported")


def test_pickled_weights_are_refused_with_what_to_do(single):
    (single / "model.safetensors").unlink()
    refused(single, r"neither model\.safetensors nor")
    (single / "pytorch_model.bin").write_bytes(b"\x80\x02")
    refused(single, r"pickled weights only \(pytorch_model\.bin\).*convert them to safetensors")


def test_a_name_that_is_not_canonical_is_refused(single):
    with pytest.raises(CheckpointError, match=r"no tensor 'layers\.9\.q_proj'"):
        open_checkpoint(single).tensor("layers.9.q_proj")
