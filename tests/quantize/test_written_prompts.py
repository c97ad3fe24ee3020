"""The prompts that come with `distill`."""

import gzip
import json
import re
from collections import Counter
from itertools import islice

from shared_files import shared_path

from omnidraft_npu.quantize.distillation.written_prompts import written_prompts


def words(text):
    return " ".join(re.findall(r"\w+", text.lower()))


def rows_of(name):
    path = shared_path(f"data/{name}")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def prompts_of_tests():
    """Every prompt of a split that is for tests only."""
    gsm8k = [row["question"] for row in rows_of("gsm8k/test_first600.jsonl")]
    mbpp = [row["text"] for row in rows_of("mbpp/mbpp.jsonl") if 11 <= row["task_id"] <= 510]
    instructions = [
        text
        for row in rows_of("instructions/user_oriented_instructions.jsonl")
        for text in (row["instruction"], *(i["input"] for i in row["instances"]))
    ]
    programs = rows_of("humaneval/HumanEval.jsonl.gz")
    docstrings = [row["prompt"].partition('"""')[2] for row in programs]
    return [*gsm8k, *mbpp, *instructions, *docstrings]


def test_no_prompt_is_that_of_a_test():
    """Letter case, spaces and marks aside; nor does one hold the other."""
    tests = {words(text) for text in prompts_of_tests()} - {""}
    assert len(tests) > 1400
    for seed in range(3):
        mine = {words(prompt.prompt) for prompt in written_prompts(seed)}
        assert not mine & tests
        everything = "\n".join(sorted(mine))
        long_tests = [text for text in tests if len(text.split()) >= 5]
        assert [text for text in long_tests if text in everything] == []
        all_tests = "\n".join(sorted(tests))
        assert [text for text in mine if len(text.split()) >= 5 and text in all_tests] == []


def test_the_families_are_interleaved_and_follow_the_seed():
    first = Counter(p.task for p in islice(written_prompts(0), 16))
    assert set(first) == {"maths", "code", "chat", "summarising", "plain"}
    assert max(first.values()) - min(first.values()) <= 1
    assert list(written_prompts(0)) == list(written_prompts(0)) != list(written_prompts(1))
