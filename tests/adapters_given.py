"""A tiny bundle with adapters, and its command: what tests of `adapters` share."""

import json
import re

import numpy as np
from click.testing import CliRunner
from decoder_graphs import HEAD_DIM, HEADS, HIDDEN, LAYERS, RANK
from tiny_bundle import write_bundle

from omnidraft_npu.acceptance_head import head_shapes
from omnidraft_npu.bundle import open_bundle
from omnidraft_npu.cli import cli
from omnidraft_npu.runtime.adapter_files import AdapterKey
from omnidraft_npu.runtime.adapter_store import AdapterStore
from omnidraft_npu.state_folder import adapters_path, replay_path

SHAPES = {
    f"lora.layers.{i}.q_proj.{side}": shape
    for i in range(LAYERS)
    for side, shape in (("A", (HIDDEN, RANK)), ("B", (RANK, HEADS * HEAD_DIM)))
}


def write_adaptable_bundle(folder):
    """Its drafter is that which ships, by its name."""
    root = write_bundle(folder)
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["drafter"]["source"] = "omnidraft-tiny"
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def key_of(bundle, target="other"):
    opened = open_bundle(bundle)
    return AdapterKey.of(opened, opened.target(target))


def store_of(bundle, target="other"):
    return AdapterStore(adapters_path(bundle, target), key_of(bundle, target))


def tensors(seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def learn(bundle, target="other"):
    """Three versions, the last in use and the one before it better than its parent."""
    store = store_of(bundle, target)
    store.add(tensors(1), parent=0, num_examples=8, num_updates=2)
    facts = {"acceptance_before": 0.25, "acceptance_after": 0.375, "num_examples": 16}
    store.add(tensors(2), parent=1, **facts)
    store.add(tensors(3) | tensors(4, head_shapes(HIDDEN)), parent=2)
    store.use(3)
    replay_path(bundle, target).mkdir(parents=True)
    (replay_path(bundle, target) / "00000001.safetensors").write_bytes(b"an example")
    return store


def run(*arguments, **options):
    return CliRunner().invoke(cli, ["adapters", *map(str, arguments)], **options)


def assert_one_line(result, exit_code, words):
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert re.search(words, line), line
