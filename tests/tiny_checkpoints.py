"""Tiny checkpoints as users have them: a folder with weights, configuration and a tokenizer."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_models import tiny_model

SENTENCES = (
    "the small drafter proposes and the large target verifies",
    "a bridge between two vocabularies works on bytes",
    "numbers 0 1 2 3 4 5 6 7 8 9 and marks , . ; : ! ?",
    "def add(a, b):\n\treturn a + b\n",
)


def train_tokenizer(vocab_size: int, seed_text: str = "") -> str:
    """A byte-level BPE `tokenizer.json` of exactly `vocab_size` ids.

    Ids 0 to 2 are <pad>, <bos> and <eos>; another `seed_text` gives other merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*SENTENCES, seed_text] * 4, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "more text is needed for so many pieces"
    return tokenizer.to_str()


def save_tiny_model(
    folder: Path, architecture: str, *, max_shard_size: str = "1GB", **settings: Any
) -> None:
    """Save a `tiny_model` as a Hugging Face folder, without a tokenizer.

    A Python without torch (`.ci/arm64`) has it done by the one that OMNIDRAFT_TEST_TORCH names.
    """
    if "OMNIDRAFT_TEST_TORCH" not in os.environ:
        tiny_model(architecture, **settings).save_pretrained(folder, max_shard_size=max_shard_size)
        return
    process = _torch_process()
    assert process.stdin and process.stdout
    request = [str(folder), architecture, {"max_shard_size": max_shard_size, **settings}]
    print(json.dumps(request), file=process.stdin, flush=True)
    if not process.stdout.readline():
        raise RuntimeError(f"{os.environ['OMNIDRAFT_TEST_TORCH']} could not make {architecture}")


@functools.cache
def _torch_process() -> "subprocess.Popen[str]":
    """A Python with torch that saves what it is asked to, kept as importing torch takes seconds."""
    own = ("PYTHONHOME", "PYTHONPATH", "OMNIDRAFT_TEST_TORCH")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.Popen(
        [os.environ["OMNIDRAFT_TEST_TORCH"], __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def write_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    vocab_size: int = 300,
    num_logits: int | None = None,
    seed: int = 0,
    seed_text: str = "",
    **overrides: Any,
) -> Path:
    """A Hugging Face folder of a tiny random model with a tokenizer of its own."""
    save_tiny_model(
        folder, architecture, seed=seed, vocab_size=num_logits or vocab_size, **overrides
    )
    (folder / "tokenizer.json").write_text(train_tokenizer(vocab_size, seed_text))
    config = {"eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    for line in sys.stdin:
        where, kind, options = json.loads(line)
        save_tiny_model(Path(where), kind, **options)
        print("saved", flush=True)
