"""Prompt files: what is read, and what a bad one is told."""

import json
from collections import Counter

import pytest

from omnidraft_npu.errors import PromptError
from omnidraft_npu.prompts import TaskPrompt, builtin_prompts, first_of_each, read_prompts


def test_the_builtin_set_has_eight_prompts_of_each_task():
    prompts = builtin_prompts()
    assert Counter(p.task for p in prompts) == dict.fromkeys(
        ("chat", "maths", "code", "summarising"), 8
    )
    assert len({p.prompt for p in prompts}) == 32


def test_rows_keep_their_order_text_and_task(tmp_path):
    rows = [
        {"prompt": "one\ntwo 雪\u2028", "task": "a"},
        {"prompt": "two"},
        {"prompt": "x", "task": "b", "id": 7},
    ]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    assert read_prompts(tmp_path / "p.jsonl") == [
        TaskPrompt(prompt="one\ntwo 雪\u2028", task="a"),
        TaskPrompt(prompt="two", task="other"),
        TaskPrompt(prompt="x", task="b"),
    ]


def test_a_text_file_is_one_prompt(tmp_path):
    (tmp_path / "p.txt").write_text('{"prompt": 1}\n\nend\n')
    assert read_prompts(tmp_path / "p.txt") == [TaskPrompt(prompt='{"prompt": 1}\n\nend')]


def test_the_first_of_each_task_are_kept_in_order():
    prompts = [TaskPrompt(prompt=str(i), task="ab"[i % 2]) for i in range(7)]
    assert [p.prompt for p in first_of_each(prompts, 2)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["p.jsonl", "no prompt"]),
        (b"\n \n", ["no prompt"]),
        (b'{"prompt": "caf\xe9"}', ["not UTF-8", "0xe9", "byte 15"]),
        (b'{"prompt": "a"}\n\n{"prompt": "b"', ["line 3", "not JSON"]),
        (b'"a"', ["line 1 is 'a', must be an object"]),
        (b'{"text": "a"}', ["line 1", "'prompt'"]),
        (b'{"prompt": ""}', ["line 1", "empty"]),
        (b'{"prompt": ["a"]}', ["line 1: prompt is a list, must be a string"]),
        (b'{"prompt": "a", "task": 3}', ["line 1: task is 3, must be a string"]),
        (b'{"prompt": "a", "task": "all"}', ["line 1", "'all'"]),
        (b'{"prompt": "a\\ud800"}', ["line 1", "surrogate"]),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path, data, words):
    (tmp_path / "p.jsonl").write_bytes(data)
    with pytest.raises(PromptError) as caught:
        read_prompts(tmp_path / "p.jsonl")
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PromptError, match=r"nowhere\.jsonl: No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")
