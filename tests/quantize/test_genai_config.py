import json

import numpy as np
import onnx
import pytest
from tiny_models import tiny_model

from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.quantize.genai_config import write_genai_config


@pytest.fixture(params=["llama", "qwen3", "gemma3_text"])
def exported(request, tmp_path):
    """A tiny float32 graph with its configuration, and the transformers model."""
    model = tiny_model(request.param)
    model.save_pretrained(tmp_path / "source")
    checkpoint = open_checkpoint(tmp_path / "source")
    options = CpuGraphOptions(precision="fp32", context_length=64)
    build_cpu_decoder(checkpoint.config, checkpoint.tensor, tmp_path / "cpu", options)
    path = write_genai_config(
        tmp_path / "cpu",
        checkpoint.config,
        context_length=64,
        eos_token_ids=(2, 5),
        bos_token_id=1,
    )
    return path, model


def test_every_name_it_gives_is_one_of_the_graph(exported):
    path, _ = exported
    model = json.loads(path.read_text())["model"]
    graph = onnx.load(path.parent / model["decoder"]["filename"], load_external_data=False).graph
    tensors = {value.name for value in graph.initializer}
    layers = range(model["decoder"]["num_hidden_layers"])

    for kind, values in (("inputs", graph.input), ("outputs", graph.output)):
        patterns = model["decoder"][kind].values()
        names = {p % i if "%d" in p else p for p in patterns for i in layers}
        assert names == {value.name for value in values} - tensors


def test_it_ends_at_the_models_own_ids(exported):
    model = json.loads(exported[0].read_text())["model"]
    assert (model["bos_token_id"], model["eos_token_id"]) == (1, [2, 5])


def test_onnxruntime_genai_generates_the_greedy_tokens_of_transformers(exported):
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    import torch

    path, model = exported
    prompt = [1, 9, 40, 77, 12]
    params = genai.GeneratorParams(opened := genai.Model(str(path.parent)))
    params.set_search_options(max_length=30, do_sample=False)
    generator = genai.Generator(opened, params)
    generator.append_tokens(np.array(prompt, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    generated = generator.get_sequence(0).tolist()

    ids = torch.tensor([generated])
    with torch.no_grad():
        expected = model(ids).logits[0].argmax(-1).tolist()
    assert generated[:5] == prompt
    assert generated[5:] == expected[4:-1]
    assert len(generated) == 30 or generated[-1] in (2, 5)
