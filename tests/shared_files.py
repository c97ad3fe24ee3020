"""Tokenizers and texts that are not part of the project; tests that need them skip without."""

import functools
import gzip
import json
import os
from pathlib import Path

import pytest

from omnidraft_npu.bridge.pieces import PieceEncoder
from omnidraft_npu.bridge.vocabulary import Vocabulary

SHARED = Path(
    os.environ.get("OMNIDRAFT_TEST_SHARED", Path(__file__).resolve().parents[2] / "shared")
)

# Name -> ids that end a response, BOS where the model wants one, rows of the model's logits.
TOKENIZERS = {
    "llama2": ((2,), 1, 32_000),
    "llama3": ((128_001, 128_009), 128_000, 128_256),
    "qwen3": ((151_645, 151_643), None, 151_936),
    "gemma3": ((1, 106), 2, 262_144),
    "smollm2": ((2,), None, 49_152),
}


def shared_path(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not in the folder that OMNIDRAFT_TEST_SHARED names")
    return path


@functools.cache
def tokenizer_document(name: str) -> dict:
    return json.loads(shared_path(f"tokenizers/{name}/tokenizer.json").read_text(encoding="utf-8"))


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    eos_token_ids, bos_token_id, size = TOKENIZERS[name]
    return Vocabulary.from_tokenizer_json(
        tokenizer_document(name), size=size, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id
    )


@functools.cache
def encoder(name: str) -> PieceEncoder:
    return PieceEncoder(tokenizer_document(name), vocabulary(name))


@functools.cache
def texts() -> list[str]:
    """Questions, programs and instructions."""
    folder = shared_path("data")
    with gzip.open(folder / "humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        programs = [row["prompt"] + row["canonical_solution"] for row in map(json.loads, file)]
    lines = (folder / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:150]
    questions = [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]
    return [*programs, *questions]
