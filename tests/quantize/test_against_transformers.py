"""Every architecture in its variants: the exported CPU graph computes what transformers does."""

import numpy as np
import pytest
from graph_runner import GraphRunner
from reference_models import random_ids
from transformers_variants import VARIANTS, write_multimodal_gemma, write_variant

from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint
from omnidraft_npu.quantize.decoder_cpu import CpuGraphOptions, build_cpu_decoder

CONTEXT = 128
NEW_TOKENS = 64


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass


@pytest.fixture
def build(tmp_path):
    def run(path) -> GraphRunner:
        checkpoint = open_checkpoint(path)
        options = CpuGraphOptions(precision="fp32", context_length=CONTEXT)
        graph = build_cpu_decoder(checkpoint.config, checkpoint.tensor, tmp_path / "g", options)
        return GraphRunner(graph, capacity=CONTEXT)

    return run


def test_each_architecture_has_eight_variants():
    families = [name.partition(",")[0] for name in VARIANTS]

    assert {family: families.count(family) >= 8 for family in families} == dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma3"), True
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path, build, rng):
    assert_equal(build, tmp_path / "model", write_variant(tmp_path / "model", VARIANTS[name]), rng)


def test_the_text_part_of_a_multimodal_gemma_is_that_of_transformers(tmp_path, build, rng):
    assert_equal(build, tmp_path / "model", write_multimodal_gemma(tmp_path / "model"), rng)


def assert_equal(build, folder, reference, rng):
    """Logits within 1e-4, and so the same 64 greedy tokens."""
    prompt = random_ids(rng, 40)
    ids, rows = greedy(build(folder), prompt)
    expected = logits_of(reference, ids)
    np.testing.assert_allclose(rows, expected[:-1], rtol=0, atol=1e-4)
    assert ids[len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(axis=1).tolist()


def greedy(graph, prompt):
    """Prompt and greedy tokens, and the logits before each of them but the first."""
    rows = [graph.run(prompt)]
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(rows[-1][-1].argmax()))
        if len(ids) < len(prompt) + NEW_TOKENS:
            rows.append(graph.run(ids[-1:]))
    return ids, np.concatenate(rows)


def logits_of(reference, ids):
    import torch

    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].numpy()
