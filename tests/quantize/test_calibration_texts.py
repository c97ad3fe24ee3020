"""Calibration text: what is built in, what is read, what is refused, how it is cut."""

import json
from collections import Counter

import numpy as np
import pytest

from omnidraft_npu.errors import PromptError
from omnidraft_npu.prompts import builtin_prompts
from omnidraft_npu.quantize.calibration.texts import calibration_text, read_calibration_prompts


class Letters:
    """A tokenizer with an id for every character."""

    def __init__(self, bos_token_id=None):
        self.bos_token_id = bos_token_id

    def encode(self, text, *, add_special):
        assert not add_special
        return [ord(letter) for letter in text]


def write_rows(path, prompts):
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read(path, *, context_length=64, window=16, bos=None):
    return calibration_text(path, Letters(bos), context_length=context_length, window=window)


def test_the_built_in_prompts_are_many_and_varied_and_none_is_used_elsewhere():
    prompts = read_calibration_prompts(None)
    tasks = Counter(prompt.task for prompt in prompts)
    texts = {prompt.prompt for prompt in prompts}

    assert len(texts) == len(prompts) >= 128
    assert set(tasks) == {"chat", "maths", "code", "summarising", "languages"}
    assert min(tasks.values()) >= 16
    assert texts.isdisjoint(prompt.prompt for prompt in builtin_prompts())
    scripts = {"雨", "の", "요", "б", "ع", "ह"}
    assert all(any(letter in text for text in texts) for letter in scripts)
    first = Counter(prompt.task for prompt in prompts[:35])
    assert set(first) == set(tasks), "the first part of the file is a fair sample of it"


def test_every_eighth_prompt_is_held_out(tmp_path):
    path = write_rows(tmp_path / "p.jsonl", [letter * 5 for letter in "αβγδεζηθικ"])
    text = read(path)

    assert (text.num_prompts, text.num_tokens) == (9, 45)
    assert text.source == "p.jsonl"
    assert ord("θ") in text.held_out
    assert ord("θ") not in text.windows
    assert ord("α") in text.windows
    assert ord("α") not in text.held_out


@pytest.mark.parametrize(
    ("prompts", "calibrated", "is_enough"),
    [(["@@@"], 1, False), (["@"] * 7 + ["θ" * 60], 7, False), (["@"] * 7 + ["θ" * 4000], 7, True)],
)
def test_where_little_is_held_out_the_built_in_prompts_are_judged_by_too(
    tmp_path, prompts, calibrated, is_enough
):
    """A loss measured on a few words once marked an export as poor by chance."""
    path = write_rows(tmp_path / "p.jsonl", prompts)
    text = read(path, window=32, context_length=5000)

    assert text.num_prompts == calibrated
    assert ord("@") not in text.held_out
    assert (ord("a") not in text.held_out) is is_enough
    assert 4000 <= text.held_out.size < 5000


@pytest.mark.parametrize("bos", [None, 1])
def test_windows_are_full_and_begin_as_a_sequence_does(tmp_path, bos):
    """A pad token's activations are of no text; a model that wants BOS is lost without it."""
    text = read(write_rows(tmp_path / "p.jsonl", ["abc", "defgh"]), window=8, bos=bos)

    body = text.windows if bos is None else text.windows[:, 1:]
    row = "".join(map(chr, body.reshape(-1)))
    assert text.windows.shape[1] == 8
    assert row.startswith("abc\n\ndefgh\n\n")
    assert set(row) == set("abcdefgh\n")
    if bos is not None:
        assert np.all(text.windows[:, 0] == bos)


def test_a_text_file_holds_a_prompt_a_paragraph(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n\n\nthree\r\n\r\nfour\n", encoding="utf-8")

    assert [p.prompt for p in read_calibration_prompts(path)] == ["one\ntwo", "three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "holds no prompt"),
        ("p.txt", b"\n \n", "holds no prompt"),
        ("p.jsonl", b'{"prompt": "\xff"}', "is not UTF-8 text"),
        ("p.jsonl", b'{"prompt": "abc"}\n{"text": "x"}', "line 2 lacks 'prompt'"),
        (
            "p.jsonl",
            b'{"prompt": "ab"}\n{"prompt": "abcdefgh"}',
            "prompt 2 has 8 tokens, more than",
        ),
        ("p.txt", b"ab\n\nabcdefgh", "prompt 2 has 8 tokens, more than the context of 7"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message) as error:
        read(tmp_path / name, context_length=7, window=4)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(PromptError, match="cannot read"):
        read(tmp_path / "p.jsonl")
