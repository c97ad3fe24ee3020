"""Checkpoints whose documents and headers hold anything: read, or refused in one line.

Seeded, some seconds long; `OMNIDRAFT_FUZZ_CASES` sets the cases of each test.
"""

import json
import os
import random
import warnings

import pytest
from tiny_checkpoints import save_tiny_model, write_checkpoint
from tiny_gguf import write_gguf
from tiny_models import tiny_model

from omnidraft_npu.errors import OmniDraftError
from omnidraft_npu.generation_defaults import generation_defaults, not_followed
from omnidraft_npu.quantize.checkpoints.open_checkpoint import open_checkpoint

CASES = int(os.environ.get("OMNIDRAFT_FUZZ_CASES", "80"))
ODD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    10**30,
    -(10**30),
    0.5,
    -0.0,
    1e308,
    1e-308,
    "",
    "x",
    "\x1b[31m\n",
    "é" * 3000,
    [],
    {},
    [None],
    [[[]]],
    ["full_attention"],
    [1, "a", {}],
    {"a": None},
    {"rope_type": "llama3"},
    {"full_attention": 5, "sliding_attention": []},
    ["x"] * 3000,
]


def survives(read) -> bool:
    """Whether it was read; what is refused is one line of a bounded length."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            read()
        except OmniDraftError as error:
            assert "\n" not in str(error) and len(str(error)) < 1200, str(error)[:2000]
            return False
    return True


def copy_of(document):
    return json.loads(json.dumps(document))


def places(document, path=()):
    """Paths of all values in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutated(document, rng):
    """A copy with one to three values replaced, or dropped."""
    copy = copy_of(document)
    for _ in range(rng.randint(1, 3)):
        *parents, last = rng.choice(list(places(copy)))
        inner = copy
        for key in parents:
            inner = inner[key]
        if isinstance(inner, dict) and rng.random() < 0.1:
            del inner[last]
        else:
            inner[last] = copy_of(rng.choice(ODD))
        if not copy:
            break
    return copy


MULTIMODAL = {"model_type": "gemma3", "vision_config": {}}


@pytest.mark.parametrize("architecture", ["llama3-scaled", "qwen2", "gemma3_text", "gemma3"])
def test_any_configuration_is_read_or_refused_in_one_line(tmp_path, architecture):
    rng = random.Random(architecture)
    write_checkpoint(
        tmp_path,
        architecture.replace("gemma3_text", "gemma3")
        + "_text" * (architecture in ("gemma3", "gemma3_text")),
    )
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    if architecture == "gemma3":
        document = MULTIMODAL | {"text_config": document}

    def read():
        checkpoint = open_checkpoint(tmp_path)
        checkpoint.tensor("final_norm")

    outcomes = []
    for _ in range(CASES):
        path.write_text(json.dumps(mutated(document, rng)))
        outcomes.append(survives(read))
    assert {*outcomes} == {True, False}


def test_any_index_is_read_or_refused_in_one_line(tmp_path):
    rng = random.Random(1)
    save_tiny_model(tmp_path, "llama", max_shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    outcomes = []
    for _ in range(CASES // 3):
        path.write_text(json.dumps(mutated(document, rng)))
        outcomes.append(survives(lambda: open_checkpoint(tmp_path)))
    assert {*outcomes} == {True, False}


def test_any_generation_config_is_read_or_refused_in_one_line():
    rng = random.Random(2)
    document = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [1],
        "typical_p": 1.0,
    }

    def read(changed):
        defaults = generation_defaults(changed, "generation_config.json")
        defaults.sampling()
        defaults.used()
        not_followed(changed)

    outcomes = []
    for _ in range(5 * CASES):
        changed = mutated(document, rng)
        outcomes.append(survives(lambda changed=changed: read(changed)))
    assert {*outcomes} == {True, False}


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_any_header_is_read_or_refused_in_one_line(tmp_path, suffix):
    """Bytes are changed, lost and repeated; numbers replaced by others of their size."""
    rng = random.Random(suffix)
    if suffix == "gguf":
        path = opened = write_gguf(tmp_path / "model.gguf", tiny_model("llama3-scaled"))
        length = path.read_bytes().rindex(b"output_norm.weight") + 60
    else:
        opened = write_checkpoint(tmp_path, "llama")
        path = tmp_path / "model.safetensors"
        length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    whole = path.read_bytes()
    outcomes = []
    for _ in range(3 * CASES):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(length)
            match rng.randrange(5):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    data[place : place + 8] = rng.choice(
                        [b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little")]
                    )
                case 2:
                    del data[place : place + rng.randrange(1, 40)]
                case 3:
                    data[place:place] = data[place : place + rng.randrange(1, 40)]
                case 4:
                    data = data[: rng.randrange(1, len(data))]
            length = min(length, len(data))
        path.write_bytes(data)
        length = min(len(whole), 20_000)
        outcomes.append(survives(lambda: open_checkpoint(opened)))
    assert False in outcomes
