"""Folders as onnxruntime-genai's builder writes them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoder_graphs import GENAI, HEAD_DIM, NUM_LOGITS, OPTIMUM, VOCAB, write_decoder
from toy_vocabularies import toy_document

from omnidraft_npu.errors import BundleError, CheckpointError
from omnidraft_npu.quantize.genai_model import import_genai_model
from omnidraft_npu.runtime.causal_lm import OnnxCausalLM, OnnxModel

CONTEXT = 64
SIZES = {"context_length": CONTEXT, "vocab_size": VOCAB, "num_logits": NUM_LOGITS, "threads": 1}
IDS = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB, 30)]


def write_built(folder: Path, variant=GENAI, **model) -> Path:
    """A builder's folder: graph with external data, `genai_config.json`, tokenizer."""
    graph = write_decoder(folder / "model.onnx", replace(variant, has_open_head_dim=True))
    data = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 200}
    onnx.save(onnx.load(graph), graph, **data)
    decoder = {"filename": "model.onnx", "head_size": HEAD_DIM, "num_hidden_layers": 2}
    settings = {"type": "llama", "context_length": CONTEXT, "eos_token_id": [2, 5]}
    document = {"model": {"decoder": decoder, **settings, **model}}
    (folder / "genai_config.json").write_text(json.dumps(document))
    tokenizer = toy_document(np.random.default_rng(0), 30)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_built_model_runs_with_one_shared_buffer_and_gives_the_same_logits(tmp_path):
    built = write_built(tmp_path)
    facts = import_genai_model(built, tmp_path / "out")
    plain = OnnxModel.open(write_decoder(tmp_path / "plain.onnx", GENAI), **SIZES)
    model = OnnxModel.open(tmp_path / "out" / "model.onnx", cache=facts.cache, **SIZES)
    assert (facts.cache, plain.signature.cache) == ("shared", "concat")
    lm, expected = OnnxCausalLM(model), OnnxCausalLM(plain)
    for one in (lm, expected):
        one.prefill(IDS[:12])
        one.score(IDS[20:25])
        one.rewind(13)
    np.testing.assert_allclose(lm.score(IDS[13:]), expected.score(IDS[13:]), atol=1e-5)


def test_a_model_with_attention_of_its_own_gets_a_growing_cache(tmp_path):
    facts = import_genai_model(write_built(tmp_path, OPTIMUM), tmp_path / "out")
    model = OnnxModel.open(tmp_path / "out" / "model.onnx", cache=facts.cache, **SIZES)
    assert facts.cache == "concat"
    assert OnnxCausalLM(model).score([1, 2]).shape == (2, VOCAB)


def test_the_facts_come_from_its_own_configuration(tmp_path):
    facts = import_genai_model(write_built(tmp_path), tmp_path / "out")
    assert (facts.exporter, facts.architecture) == ("external", "llama")
    assert (facts.num_logits, facts.context_length) == (NUM_LOGITS, CONTEXT)
    assert facts.tokenizer.eos_token_ids == (2, 5)
    assert facts.source_files.config["head_dim"] == HEAD_DIM
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.onnx", "model.onnx.data"]


def test_the_runtime_says_what_an_untreated_graph_leaves_open(tmp_path):
    with pytest.raises(BundleError, match="leaves the shape of past_key_values"):
        OnnxModel.open(write_built(tmp_path) / "model.onnx", **SIZES)


def test_what_is_missing_is_one_line(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    document = {"model": {"decoder": {"filename": "model.onnx"}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"model\.onnx, which genai_config\.json names"):
        import_genai_model(tmp_path, tmp_path / "out")
    write_built(tmp_path)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(CheckpointError, match=r"model\.onnx\.data is missing"):
        import_genai_model(tmp_path, tmp_path / "out")


def test_data_outside_the_folder_is_not_fetched(tmp_path):
    """A graph from a stranger names its data files."""
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    built = tmp_path / "built"
    built.mkdir()
    proto = onnx.load(write_built(built) / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    onnx.save(proto, built / "model.onnx")
    with pytest.raises(CheckpointError, match="secret is missing"):
        import_genai_model(built, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": []}, r"model is \[\], it should be an object"),
        ({"model": {"decoder": []}}, r"decoder is \[\], it should be an object"),
    ],
)
def test_sections_of_another_kind_are_named(tmp_path, change, message):
    (tmp_path / "genai_config.json").write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=message):
        import_genai_model(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("value", ["64", 0, [64]])
def test_a_context_that_is_no_size_is_named(tmp_path, value):
    with pytest.raises(CheckpointError, match="context_length is"):
        import_genai_model(write_built(tmp_path, context_length=value), tmp_path / "out")


@pytest.mark.parametrize("value", ["2", [2, [5]], [-1], True])
def test_ends_that_are_no_ids_are_named(tmp_path, value):
    with pytest.raises(CheckpointError, match="eos_token_id is"):
        import_genai_model(write_built(tmp_path, eos_token_id=value), tmp_path / "out")
