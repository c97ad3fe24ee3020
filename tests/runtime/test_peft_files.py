"""Adapters to PEFT and back: the same logits as the graphs, and one line for what cannot be."""

import json

import numpy as np
import pytest
from graph_runner import GraphRunner
from tiny_models import tiny_model

from omnidraft_npu.errors import BundleError
from omnidraft_npu.lora import MODULES
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.runtime.peft_files import read_peft, write_peft

RANK = 4
IDS = [3, 17, 80, 9, 122, 41]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def graph_path(folder, tmp_path_factory):
    checkpoint = open_checkpoint(folder)
    options = CpuGraphOptions(precision="fp32", context_length=64, lora_rank=RANK)
    graph = tmp_path_factory.mktemp("graph")
    return build_cpu_decoder(checkpoint.config, checkpoint.tensor, graph, options)


@pytest.fixture
def adapter(graph_path):
    rng = np.random.default_rng(5)
    shapes = {name: value.shape for name, value in GraphRunner(graph_path, capacity=8).lora.items()}
    return {
        name: rng.normal(scale=0.2, size=shape).astype(np.float32) for name, shape in shapes.items()
    }


def logits_here(graph_path, tensors):
    graph = GraphRunner(graph_path, capacity=64)
    graph.lora = {**graph.lora, **tensors}
    return graph.run(IDS)


def logits_of_peft(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.ptp(expected))


def test_peft_gives_the_same_logits_with_what_is_exported(folder, graph_path, adapter, tmp_path):
    peft = pytest.importorskip("peft")
    write_peft(tmp_path / "out", adapter, rank=RANK, base_model="tiny")
    model = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "out")
    expected = logits_of_peft(model.eval())
    assert_close(logits_here(graph_path, adapter), expected)
    assert np.abs(logits_here(graph_path, {}) - expected).max() > 0.01 * np.ptp(expected)


@pytest.mark.parametrize(
    ("rank", "settings"),
    [(RANK, {"lora_alpha": 12}), (3, {"lora_alpha": 5, "use_rslora": True})],
)
def test_an_adapter_of_peft_gives_the_same_logits_here(graph_path, tmp_path, rank, settings):
    peft = pytest.importorskip("peft")
    import torch

    modules = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=rank, target_modules=modules, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    tensors = read_peft(tmp_path, rank=RANK)
    assert_close(logits_here(graph_path, tensors), logits_of_peft(model))


def test_what_is_exported_comes_back(adapter, tmp_path):
    write_peft(tmp_path, adapter, rank=RANK, base_model="tiny")
    read = read_peft(tmp_path, rank=RANK)
    assert read.keys() == adapter.keys()
    for name, tensor in adapter.items():
        np.testing.assert_array_equal(read[name], tensor)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == set(MODULES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 64}, "--lora-rank 64"),
        ({"r": 2}, "another rank"),
        ({"lora_alpha": "many"}, "lora_alpha"),
    ],
)
def test_what_the_graphs_cannot_have_is_one_line(adapter, tmp_path, change, words):
    write_peft(tmp_path, adapter, rank=RANK, base_model="tiny")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BundleError, match=words) as caught:
        read_peft(tmp_path, rank=RANK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no config"])
def test_a_damaged_folder_is_one_line(adapter, tmp_path, damage):
    write_peft(tmp_path, adapter, rank=RANK, base_model="tiny")
    weights = tmp_path / "adapter_model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "missing":
        weights.unlink()
    else:
        (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        read_peft(tmp_path, rank=RANK)
