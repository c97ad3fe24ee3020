"""Prompt files of four task families, for `bench --prompts` and for learning.

    python benchmarks/task_prompts.py DATA --split test --each 8 -o prompts.jsonl

DATA is a folder with the published files: `gsm8k/train.jsonl` and `gsm8k/test*.jsonl` (MIT),
`mbpp/mbpp.jsonl` (CC BY 4.0), `humaneval/HumanEval.jsonl.gz` (MIT), and of Self-Instruct
(Apache-2.0) `instructions/seed_tasks.jsonl` and `instructions/user_oriented_instructions.jsonl`.
The passages to summarise are this project's own. Nothing of a test split is in a train file:
MBPP's tasks 11 to 510 and all of HumanEval are for tests, as is each data set's own test part.
`--base` puts them into the words that a model without a chat template goes on from.
"""

import argparse
import gzip
import importlib.resources
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_MAX_CHARACTERS = 1200
"""Longer prompts are left out."""
_BASE = {
    "gsm8k": "Question: {}\nAnswer:",
    "code": '"""\n{}\n"""\n',
    "instructions": "Instruction: {}\nResponse:",
    "summarising": "{}\nSummary:",
}
_SUMMARISE = (
    "Summarize the following text in one sentence:\n\n{}",
    "Write a short summary of this passage: {}",
    "Summarise in a few words: {}",
)


def main() -> None:
    """Draw prompts of every family and write them as one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", choices=("test", "train"), required=True)
    parser.add_argument("--each", type=int, default=8, help="prompts of each family")
    parser.add_argument("--task", action="append", choices=sorted(FAMILIES), help="only these")
    parser.add_argument("--base", action="store_true", help="for a model without a chat template")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for task in options.task or FAMILIES:
        prompts = [p for p in FAMILIES[task](options.data, options.split) if p]
        prompts = [p for p in dict.fromkeys(prompts) if len(p) <= _MAX_CHARACTERS]
        random.Random(options.seed).shuffle(prompts)
        chosen = prompts[: options.each]
        if options.base:
            chosen = [
                prompt if _is_code(prompt) else _BASE[task].format(prompt) for prompt in chosen
            ]
        rows += [{"task": task, "prompt": prompt} for prompt in chosen]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    options.output.write_text(text, encoding="utf-8")


def gsm8k(data: Path, split: str) -> Iterator[str]:
    """Word problems, as they are."""
    for path in sorted((data / "gsm8k").glob(f"{split}*.jsonl")):
        yield from (row["question"] for row in _rows(path))


def code(data: Path, split: str) -> Iterator[str]:
    """MBPP's tasks with their tests; for tests also HumanEval's beginnings of functions."""
    for row in _rows(data / "mbpp" / "mbpp.jsonl"):
        if (11 <= row["task_id"] <= 510) == (split == "test"):
            tests = "\n".join(row["test_list"])
            yield f"{row['text']}\nYour code should pass these tests:\n{tests}"
    if split == "test":
        yield from (r["prompt"] for r in _rows(data / "humaneval" / "HumanEval.jsonl.gz"))


def instructions(data: Path, split: str) -> Iterator[str]:
    """Instructions with their first input."""
    name = {"test": "user_oriented_instructions", "train": "seed_tasks"}[split]
    for row in _rows(data / "instructions" / f"{name}.jsonl"):
        given = row["instances"][0]["input"].strip()
        yield "\n\n".join(part for part in (row["instruction"].strip(), given) if part)


def summarising(data: Path, split: str) -> Iterator[str]:
    """The project's passages, each with one of three requests."""
    file = importlib.resources.files("omnidraft_npu.calib_data") / "passages.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    passages = [row["text"] for row in rows if row["split"] == split]
    for i, passage in enumerate(passages):
        yield _SUMMARISE[i % len(_SUMMARISE)].format(passage)


FAMILIES: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "gsm8k": gsm8k,
    "code": code,
    "instructions": instructions,
    "summarising": summarising,
}


def _is_code(prompt: str) -> bool:
    """Whether a prompt is the beginning of a function already, as HumanEval's are."""
    return prompt.rstrip().endswith(('"""', "'''"))


def _rows(path: Path) -> Iterator[Any]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from (json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip())


if __name__ == "__main__":
    main()
