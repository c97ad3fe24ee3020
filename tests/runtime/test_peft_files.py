"""Adapters to PEFT and back: the same logits as the graphs, and one line for what cannot be."""

import json
from dataclasses import replace

import numpy as np
import pytest
from graph_runner import GraphRunner
from tiny_models import ARCHITECTURES, tiny_model

from omnidraft_npu.drafters import DEFAULT_DRAFTER, packaged_drafter
from omnidraft_npu.drafters.float_folder import write_float_drafter
from omnidraft_npu.errors import BundleError
from omnidraft_npu.lora import MODULES
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder
from omnidraft_npu.runtime.adapter_files import AdapterKey
from omnidraft_npu.runtime.peft_files import CONFIG, WEIGHTS, read_peft, write_peft

RANK = 4
KEY = AdapterKey(drafter_sha256="d" * 64, target_tokenizer_sha256="t" * 64, rank=RANK)
IDS = [3, 17, 80, 9, 122, 41]


@pytest.fixture(scope="module")
def graph_path(tmp_path_factory):
    return graph_of(tiny_model("llama"), tmp_path_factory.mktemp("model"))


def graph_of(model, folder):
    """The float32 decoder of a transformers model, with LoRA inputs."""
    model.save_pretrained(folder / "source")
    return graph_of_folder(folder / "source", folder)


def graph_of_folder(source, folder):
    checkpoint = open_checkpoint(source)
    options = CpuGraphOptions(precision="fp32", context_length=64, lora_rank=RANK)
    return build_cpu_decoder(checkpoint.config, checkpoint.tensor, folder / "graph", options)


@pytest.fixture
def adapter(graph_path):
    return random_adapter(graph_path)


def random_adapter(graph_path, scale=0.2):
    rng = np.random.default_rng(5)
    shapes = {name: value.shape for name, value in GraphRunner(graph_path, capacity=8).lora.items()}
    return {
        name: rng.normal(scale=scale, size=shape).astype(np.float32)
        for name, shape in shapes.items()
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


def assert_equal_in_peft(model, graph_path, adapter, folder):
    """Where peft loads the exported folder on top of `model`, it computes what the graph does."""
    peft = pytest.importorskip("peft")
    write_peft(folder, adapter, key=KEY, drafter="tiny")
    expected = logits_of_peft(peft.PeftModel.from_pretrained(model, folder).eval())
    assert_close(logits_here(graph_path, adapter), expected)
    assert np.abs(logits_here(graph_path, {}) - expected).max() > 0.01 * np.ptp(expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_peft_gives_the_same_logits_with_what_is_exported(architecture, tmp_path):
    model = tiny_model(architecture)
    graph_path = graph_of(model, tmp_path)
    assert_equal_in_peft(model, graph_path, random_adapter(graph_path), tmp_path / "out")


def test_the_drafter_that_ships_takes_adapters_in_transformers_and_peft(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    source = packaged_drafter(DEFAULT_DRAFTER)
    write_float_drafter(source, tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    graph_path = graph_of_folder(source, tmp_path)
    assert_close(logits_here(graph_path, {}), logits_of_peft(model))
    adapter = random_adapter(graph_path, scale=0.05)
    assert_equal_in_peft(model, graph_path, adapter, tmp_path / "out")


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
    read = read_peft(tmp_path, key=KEY, drafter="tiny")
    assert read.rank == rank
    assert_close(logits_here(graph_path, read.tensors), logits_of_peft(model))


def test_what_is_exported_comes_back(adapter, tmp_path):
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    read = read_peft(tmp_path, key=KEY, drafter="tiny").tensors
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
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 64}, "--lora-rank 64"),
        ({"r": 2}, "another rank"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "is not JSON"),
        ({"lora_alpha": -1e9}, "lora_alpha is -1000000000.0, must be a number > -1000000000"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', must be true or false"),
    ],
)
def test_what_the_graphs_cannot_have_is_one_line(adapter, tmp_path, change, words):
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BundleError, match=words) as caught:
        read_peft(tmp_path, key=KEY, drafter="tiny")
    assert "\n" not in str(caught.value)


_WORDS = {"pickled": "so it is not", "deep": "nested over 100 levels"}


@pytest.mark.parametrize("damage", ["truncated", "missing", "pickled", "no config", "deep"])
def test_a_damaged_folder_is_one_line(adapter, tmp_path, damage):
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    weights = tmp_path / "adapter_model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "missing":
        weights.unlink()
    elif damage == "pickled":
        weights.rename(tmp_path / "adapter_model.bin")
    elif damage == "deep":
        (tmp_path / CONFIG).write_text("[" * 100_000)
    else:
        (tmp_path / CONFIG).unlink()
    with pytest.raises(BundleError, match=_WORDS.get(damage, "cannot be")):
        read_peft(tmp_path, key=KEY, drafter="tiny")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is a list, must be an object"),
        ('{"peft_type": "LORA", "r": 4}', "does not set all of r, lora_alpha, peft_type"),
        ('{"peft_type": "LORA", "r": 0, "lora_alpha": 4}', "r is 0, must be an integer >= 1"),
        ('{"peft_type": "IA3"}', "is for IA3, only LORA can be imported"),
    ],
)
def test_a_config_that_lacks_what_is_needed_names_it(adapter, tmp_path, text, words):
    """It was a Python error in brackets: `cannot be read ('r')`, even for another kind."""
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(BundleError, match=words):
        read_peft(tmp_path, key=KEY, drafter="tiny")


def test_the_acceptance_head_goes_into_a_file_that_peft_does_not_read(adapter, tmp_path):
    head = {"head.out.bias": np.full(1, 0.25, np.float32)}
    write_peft(tmp_path, adapter | head, key=KEY, drafter="tiny")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["acceptance_head.safetensors", CONFIG, WEIGHTS]
    read = read_peft(tmp_path, key=KEY, drafter="tiny").tensors
    np.testing.assert_array_equal(read["head.out.bias"], [0.25])
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    assert "head.out.bias" not in read_peft(tmp_path, key=KEY, drafter="tiny").tensors


@pytest.mark.parametrize(
    ("key", "drafter", "words"),
    [
        (KEY, "other", "drafter tiny, this bundle has other"),
        (replace(KEY, target_tokenizer_sha256="u" * 64), "tiny", "target tokenizer tttt"),
    ],
)
def test_what_was_exported_for_others_is_named_and_refused(adapter, tmp_path, key, drafter, words):
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    with pytest.raises(BundleError, match=words):
        read_peft(tmp_path, key=key, drafter=drafter)


def test_a_base_model_that_cannot_be_looked_up_is_only_told(adapter, tmp_path):
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny", base_model="x" * 5000)
    assert len(read_peft(tmp_path, key=KEY, drafter="tiny").base_model) == 5000


def test_another_precision_of_the_drafter_takes_what_was_exported(adapter, tmp_path):
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    read_peft(tmp_path, key=replace(KEY, drafter_sha256="e" * 64), drafter="tiny")


def test_an_adapter_in_bfloat16_is_read(adapter, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    path = tmp_path / WEIGHTS
    save_file({n: t.to(torch.bfloat16) for n, t in load_file(path).items()}, path)
    read = read_peft(tmp_path, key=KEY, drafter="tiny").tensors
    for name, tensor in adapter.items():
        np.testing.assert_allclose(read[name], tensor, rtol=2**-8)


def test_values_that_are_no_numbers_are_refused(adapter, tmp_path):
    adapter[min(adapter)][0, 0] = np.nan
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    with pytest.raises(BundleError, match="no numbers"):
        read_peft(tmp_path, key=KEY, drafter="tiny")


def test_what_fills_up_a_smaller_rank_can_still_be_learned(adapter, tmp_path):
    """With zeros in A and B no gradient would ever reach them."""
    write_peft(tmp_path, adapter, key=KEY, drafter="tiny")
    read = read_peft(tmp_path, key=replace(KEY, rank=RANK + 2), drafter="tiny").tensors
    for name, tensor in read.items():
        more = tensor[:, RANK:] if name.endswith(".A") else tensor[RANK:]
        assert np.all(more != 0) if name.endswith(".A") else not np.any(more)
