"""GGUF files against the safetensors of the same weights."""

import struct
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from real_models import real_model
from tiny_gguf import write_gguf
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.errors import CheckpointError
from omnidraft_npu.quantize.architecture import Llama3Scaling
from omnidraft_npu.quantize.checkpoints.gguf_keys import decided_metadata
from omnidraft_npu.quantize.checkpoints.gguf_rope import llama3_factors, llama3_scaling
from omnidraft_npu.quantize.checkpoints.hf_config import decoder_config
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

# Gemma's rule for the attention scale and for the kinds of layers is not in the file.
GEMMA = {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None}


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def model_for(architecture: str, **overrides):
    own = GEMMA if architecture == "gemma3_text" else {}
    return tiny_model(architecture, **own | overrides)


def both(tmp_path: Path, model, encoding: str = "F32"):
    model.save_pretrained(tmp_path / "folder")
    return open_checkpoint(tmp_path / "folder"), open_checkpoint(
        write_gguf(tmp_path / "model.bin", model, encoding)
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gguf_describes_and_holds_what_the_folder_does(tmp_path, architecture):
    folder, gguf = both(tmp_path, model_for(architecture))

    assert gguf.config == folder.config
    for name in folder.config.tensor_shapes():
        np.testing.assert_allclose(gguf.tensor(name), folder.tensor(name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_biases_are_found_and_brought_to_our_layout(tmp_path, architecture):
    overrides = {"attention_bias": True} | ({"mlp_bias": True} if architecture == "llama" else {})
    folder, gguf = both(tmp_path, model_for(architecture, **overrides))

    assert gguf.config == folder.config
    assert gguf.config.has_output_bias
    for name in folder.config.tensor_shapes():
        np.testing.assert_array_equal(gguf.tensor(name), folder.tensor(name), err_msg=name)


@pytest.mark.parametrize("encoding", ["F16", "BF16", *QUANTIZED])
def test_every_encoding_is_close_to_the_weights_it_encodes(tmp_path, encoding):
    folder, gguf = both(tmp_path, model_for("llama"), encoding)

    # Largest error over largest weight: half a step of the encoding, with room for its scale.
    bound = {"F16": 1e-3, "BF16": 5e-3, "Q8_0": 0.005}.get(encoding, 0.1)
    for name in ("embed_tokens", "layers.1.q_proj", "layers.2.down_proj"):
        expected = folder.tensor(name)
        error = np.abs(gguf.tensor(name) - expected).max() / np.abs(expected).max()
        assert 0 < error < bound, name


def test_linear_rotary_scaling_is_read(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    folder, gguf = both(tmp_path, model_for("llama", rope_parameters=rope))

    assert gguf.config == folder.config
    assert gguf.config.rope.linear_factor == 4.0


def test_the_document_made_from_the_metadata_is_one_that_transformers_understands(tmp_path):
    from transformers import AutoConfig

    for architecture in ARCHITECTURES:
        model = model_for(architecture)
        gguf = open_checkpoint(write_gguf(tmp_path / architecture, model))
        document = gguf.source_files.config

        theirs = AutoConfig.for_model(**document).to_dict()
        theirs |= {"architectures": document["architectures"]}

        assert decoder_config(document, "made") == gguf.config
        assert decoder_config(theirs, "theirs") == gguf.config


def test_the_model_file_of_gemma_27b_has_another_attention_scale(tmp_path):
    model = tiny_model("gemma3_text", num_hidden_layers=62, layer_types=None, hidden_size=32)

    gguf = open_checkpoint(write_gguf(tmp_path / "model.gguf", model))

    assert gguf.config.attention_scale == (32 / 4) ** -0.5


@pytest.mark.parametrize(("factor", "context"), [(8.0, 8192), (32.0, 8192), (4.0, 1024)])
def test_llama_3_scaling_is_recovered_from_its_divisors(factor, context):
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=context
    )
    factors = llama3_factors(scaling, 5e5, 128).astype(np.float32)

    assert 4 < np.count_nonzero((factors > 1) & (factors < factor)) < 32
    assert llama3_scaling(factors.tolist(), 5e5) == scaling
    assert llama3_scaling((factors * np.float32(1.0001)).tolist(), 5e5) is None
    assert llama3_scaling(factors.tolist(), 4e5) is None


def test_frequency_factors_that_are_not_llama_3s_are_refused(tmp_path):
    rope = dict(tiny_model("llama3-scaled").config.rope_parameters) | {"high_freq_factor": 3.0}
    model = tiny_model("llama3-scaled", rope_parameters=rope)
    path = write_gguf(tmp_path / "model.gguf", model)

    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is .*llama3"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gpt2"}, "'gpt2' is not supported; supported are llama"),
        ({"split.count": 3}, "part 1 of 3 parts"),
        ({"llama.expert_count": 4}, "mixture of experts is not supported; use its Hugging Face"),
        ({"llama.rope.scaling.type": "yarn"}, "rope_type is 'yarn'"),
        ({"llama.rope.dimension_count": 8}, r"partial_rotary_factor is 0\.5"),
        ({"llama.logit_scale": 2}, "logit_scale is 2"),
        ({"llama.attention.value_length": 8}, "value_length is 8"),
        ({"llama.attention.key_length_swa": 8}, "key_length_swa is 8"),
        ({"llama.attention.shared_kv_layers": 2}, "shared_kv_layers is 2"),
        ({"llama.nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, metadata, message):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), metadata=metadata)

    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_claim_of_endless_layers_is_refused(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model("llama"), metadata={"llama.block_count": 2**31 - 1}
    )

    with pytest.raises(CheckpointError, match="num_hidden_layers is 2147483647, but the check"):
        open_checkpoint(path)


def bare_gguf(path: Path, key: str, value: bytes) -> Path:
    """A file of one metadata key and no tensor."""
    fixed = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key))
    path.write_bytes(fixed + key.encode() + value)
    return path


def test_an_architecture_that_is_no_text_is_refused(tmp_path):
    array = struct.pack("<IIQB", 9, 0, 1, 7)
    path = bare_gguf(tmp_path / "model.gguf", "general.architecture", array)

    with pytest.raises(CheckpointError, match=r"architecture \[7\] is not supported"):
        open_checkpoint(path)


def test_arrays_of_arrays_without_end_are_refused(tmp_path):
    arrays = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50_000
    path = bare_gguf(tmp_path / "model.gguf", "key", arrays)

    with pytest.raises(CheckpointError, match="nests arrays more than 8 deep"):
        open_checkpoint(path)


def test_a_file_cut_at_any_place_is_said_to_be_cut(tmp_path):
    """Cuts in the fixed part, the metadata, the tensor list and the data; all one line."""
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [5, 20, *range(100, len(whole), 4_999), len(whole) - 33]:
        cut.write_bytes(whole[:length])

        with pytest.raises(CheckpointError, match=r"cut\.gguf is cut short or damaged") as caught:
            open_checkpoint(cut)
        assert "\n" not in str(caught.value)


def test_what_is_not_a_gguf_is_told_by_its_contents(tmp_path):
    path = tmp_path / "model.gguf"
    for content, message in (
        (b"", "is empty"),
        (b"GGU", "is not a GGUF file"),
        (b"PK\x03\x04 something else", "is a ZIP archive"),
    ):
        path.write_bytes(content)
        refused(path, message)


def test_without_the_package_that_decodes_blocks_it_says_how_to_get_it(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(CheckpointError, match=r"pip install '\.\[export\]'"):
        open_checkpoint(path)


def test_a_folder_of_gguf_files_says_to_give_one_of_them(tmp_path):
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"))

    with pytest.raises(CheckpointError, match=r"give one of them: .*model\.gguf"):
        open_checkpoint(tmp_path)


def test_a_file_of_another_version_or_byte_order_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    whole = path.read_bytes()
    for version in (b"\1\0\0\0", b"\0\0\0\3"):
        path.write_bytes(whole[:4] + version + whole[8:])

        with pytest.raises(CheckpointError, match="version"):
            open_checkpoint(path)


def test_a_tensor_type_that_is_not_read_is_named_with_those_that_are(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    raw = bytearray(path.read_bytes())
    place = raw.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16
    raw[place : place + 4] = (10).to_bytes(4, "little")
    path.write_bytes(raw)

    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is stored as Q2_K.*Q4_K"):
        open_checkpoint(path)


def test_frequency_factors_of_another_encoding_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama3-scaled"))
    raw = bytearray(path.read_bytes())
    place = raw.index(b"rope_freqs.weight") + len(b"rope_freqs.weight") + 4 + 8
    raw[place : place + 4] = (10).to_bytes(4, "little")
    path.write_bytes(raw)

    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is stored as Q2_K"):
        open_checkpoint(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf", tiny_model("llama"), metadata={"llama.feed_forward_length": 80}
    )

    with pytest.raises(CheckpointError, match=r"ffn_gate\.weight has shape \[96, 64\].*\[80, 64\]"):
        open_checkpoint(path)


def test_a_tensor_without_a_place_in_the_decoder_is_refused(tmp_path):
    """Attention biases of the first layer say whether there are any."""
    model = tiny_model("llama", attention_bias=True)
    path = write_gguf(tmp_path / "model.gguf", model)
    raw = path.read_bytes().replace(b"blk.0.attn_output.bias", b"blk.0.attn_uutput.bias")
    path.write_bytes(raw)

    with pytest.raises(CheckpointError, match=r"no place in a llama .* use its Hugging Face"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["smollm2.gguf", "gemma3-270m.gguf"])
def test_a_real_model_opens_at_once_and_holds_every_tensor(name):
    checkpoint = open_checkpoint(real_model(name))

    config = checkpoint.config
    for tensor, shape in config.tensor_shapes().items():
        if tensor != "embed_tokens":
            assert checkpoint.tensor(tensor).shape == shape
    assert config.has_tied_head
    if name == "gemma3-270m.gguf":
        assert config.layer_types.count("full") == 3


def raw_gguf(path, *fields, tensors=(), num_fields=None, num_tensors=None, data=b""):
    """A file of hand-made fields ``(key, type, bytes)`` and tensors ``(name, shape, offset)``."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    header = struct.pack(
        "<4sIQQ",
        b"GGUF",
        3,
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    for key, kind, value in fields:
        header += text(key) + struct.pack("<I", kind) + value
    for name, shape, offset in tensors:
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


ARCHITECTURE = ("general.architecture", 8, struct.pack("<Q", 5) + b"llama")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.no": 1, "split.count": 5}, "is part 2 of 5 parts; join them with llama-gguf-spl"),
        ({"general.type": "adapter"}, "holds a LoRA adapter, not a model; merge it"),
        ({"general.type": "mmproj"}, r"reads images or sound \(mmproj\)"),
        ({"general.architecture": "clip"}, r"reads images or sound \(mmproj\)"),
        ({"general.type": "imatrix"}, r"statistics for quantising"),
        ({"general.architecture": "llama"}, "holds a vocabulary only, no weights"),
    ],
)
def test_a_file_that_is_no_whole_model_is_called_what_it_is(tmp_path, metadata, message):
    """Later parts of a split file name no architecture."""
    fields = [
        (key, 8, struct.pack("<Q", len(value)) + value.encode())
        if isinstance(value, str)
        else (key, 2, struct.pack("<H", value))
        for key, value in metadata.items()
    ]
    refused(raw_gguf(tmp_path / "part.gguf", *fields), message)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"fields": [ARCHITECTURE, ARCHITECTURE]}, "its metadata has general.architecture twice"),
        ({"tensors": [("a", [4], 0), ("a", [4], 32)]}, "it has tensor a twice"),
        ({"tensors": [("a", [4], 0), ("b", [4], 0)]}, "tensor b lies at 0 instead of 32"),
        ({"tensors": [("a", [4], 64)]}, "tensor a lies at 64 instead of 0"),
        ({"tensors": [("a", [2**40, 2**40], 0)]}, "end inside tensor a"),
        ({"tensors": [("a", [2**63, 4], 2**63)]}, "tensor a lies at"),
        ({"tensors": [("a", [1] * 5, 0)]}, "tensor a has 5 dimensions"),
        ({"tensors": [("a\n" + "x" * 500, [4], 64)]}, r"tensor a\\nx+… lies at"),
        ({"fields": [("general.alignment", 4, struct.pack("<I", 24))]}, "alignment is 24, not a"),
        ({"num_tensors": 2**40}, "claims 1099511627776 tensors"),
        ({"num_fields": 2**63}, "claims 9223372036854775808 fields"),
        ({"fields": [("a", 8, struct.pack("<Q", 2**62))]}, "a string of 4611686018427387904 bytes"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, parts, message):
    fields = parts.pop("fields", [ARCHITECTURE])
    refused(raw_gguf(tmp_path / "odd.gguf", *fields, data=bytes(256), **parts), message)


@pytest.mark.parametrize("kind", [0, 7, 8, 9, 10])
def test_a_huge_array_takes_neither_memory_nor_time(tmp_path, kind):
    """200 MB of small items, which as Python values are gigabytes; on disk there is nothing."""
    count = 200_000_000 // {0: 1, 7: 1, 8: 8, 9: 12, 10: 8}[kind]
    path = raw_gguf(tmp_path / "big.gguf", ("a", 9, struct.pack("<IQ", kind, count)))
    with path.open("r+b") as file:
        file.truncate(210_000_000)
    started = time.perf_counter()
    tracemalloc.start()
    try:
        refused(path, f"claims {count} items of an array in its header")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    assert time.perf_counter() - started < 5


def test_every_key_of_the_package_that_describes_a_decoder_is_decided_on():
    import gguf

    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    keys = {
        value.removeprefix("{arch}.")
        for group in groups
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}.") and "{dense}" not in value
    }
    assert len(keys) > 50
    assert keys <= decided_metadata()


def test_metadata_that_nobody_knows_is_warned_of_by_name(tmp_path, caplog):
    metadata = {"llama.brand_new": 5, "llama.vocab_size": 160, "custom.key": 1}
    open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), metadata=metadata))
    assert [r.getMessage() for r in caplog.records] == ["m.gguf: not used: llama.brand_new"]
