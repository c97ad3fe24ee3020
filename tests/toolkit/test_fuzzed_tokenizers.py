"""Tokenizer documents and templates that hold anything: used, or refused in one line.

Seeded, some seconds long; `OMNIDRAFT_FUZZ_CASES` sets the cases of each test.
"""

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level, space_mark

from omnidraft_npu.bridge.vocabulary import Vocabulary
from omnidraft_npu.errors import OmniDraftError
from omnidraft_npu.text.chat_template import render_chat
from omnidraft_npu.text.detokenizer import StreamDecoder
from omnidraft_npu.text.tokenizer import Tokenizer

CASES = int(os.environ.get("OMNIDRAFT_FUZZ_CASES", "120"))
ODD: list[Any] = [
    *(None, True, 0, 1, -1, 300, 2**31, 2**64, 0.5, 1e308, "", "x", "<bos>", "\x1b[31m\n"),
    *("é" * 3000, "{{ x", [], {}, [None], [[[]]], [1, "a", {}], {"a": None}, ["a", "b"]),
    *({"content": 5}, {"type": "Sequence"}, {"type": "ByteLevel"}, ["x"] * 500),
]
TEMPLATE = b"{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
CONFIG = {
    "bos_token": "<bos>",
    "eos_token": {"content": "<eos>", "special": True},
    "add_bos_token": True,
    "added_tokens_decoder": {"257": {"content": "<bos>", "special": True}},
    "extra_special_tokens": {"image_token": "<think>"},
    "chat_template": [
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ],
}


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of the values of a document, of the vocabulary a few."""
    items = list(document.items() if isinstance(document, dict) else enumerate(document))
    for key, value in items[:4] + items[-2:] if len(items) > 50 else items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutated(document: Any, rng: random.Random) -> Any:
    """A copy with one to three values replaced, dropped or said twice."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        *path, key = rng.choice(list(places(document)) or [(None,)])
        parent = document
        for step in path:
            parent = parent[step]
        if key is None:
            return copy.deepcopy(rng.choice(ODD))
        if rng.random() < 0.2:
            del parent[key]
        else:
            parent[key] = copy.deepcopy(rng.choice(ODD))
    return document


def use(folder: Path) -> None:
    """All that is done with a tokenizer."""
    ours = Tokenizer.from_folder(folder)
    ids = ours.encode("a <think>é<bos>", add_special=True)
    ours.encode("a <bos>", add_special=False, parse_special=False)
    assert isinstance(ours.decode(ids), str)
    StreamDecoder(ours).push(ids)
    assert ours.size >= 0 and len(ours.content_sha256) == 64
    Vocabulary.from_tokenizer_json(ours.json, bos_token_id=ours.bos_token_id).all_bytes()
    if ours.has_chat_template:
        ours.encode_chat([{"role": "user", "content": "<bos>"}])
        ours.encode_chat([{"role": "user", "content": "a"}], tools=[{"name": "t"}])


def is_used(folder: Path, seed: int) -> bool:
    """Whether it works; what is refused is one line of a bounded length."""
    try:
        use(folder)
    except OmniDraftError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, (seed, str(error)[:2000])
        return False
    return True


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_documents_that_hold_anything_are_used_or_refused(tmp_path: Path, name: str) -> None:
    outcomes = set()
    for seed in range(CASES):
        rng = random.Random(f"{name} {seed}")
        document = byte_level() if seed % 2 else space_mark()
        documents = {"tokenizer.json": document, "tokenizer_config.json": CONFIG}
        documents[name] = mutated(documents[name], rng)
        for file, content in documents.items():
            (tmp_path / file).write_text(json.dumps(content))
        outcomes.add(is_used(tmp_path, seed))
    assert outcomes == {True, False}


def test_documents_with_changed_bytes_are_used_or_refused(tmp_path: Path) -> None:
    for seed in range(CASES):
        rng = random.Random(seed)
        contents = {
            "tokenizer.json": json.dumps(byte_level()).encode(),
            "tokenizer_config.json": json.dumps(CONFIG).encode(),
            "special_tokens_map.json": b'{"eos_token": "<eos>"}',
            "chat_template.jinja": TEMPLATE,
        }
        name = rng.choice(list(contents))
        data = bytearray(contents[name])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((0, 1, 1, 9))] = bytes(
                rng.choices(range(256), k=rng.choice((0, 1, 3)))
            )
        for file, content in (contents | {name: bytes(data)}).items():
            (tmp_path / file).write_bytes(content)
        is_used(tmp_path, seed)


PARTS = (
    *("{{ x }}", "{{ ns.x }}", "{{ ns.x | tojson(indent=2) }}", "{{ ns.x | list }}", "{% break %}"),
    *("{% for i in range(99999) %}", "{% for c in ns.x %}", "{% endfor %}", "{% if ns.x %}"),
    *("{% endif %}", "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = [ns.x, ns.x, 1] %}"),
    *("{% set ns.x = ns.x * 9 %}", "{% set ns.x = {'k': ns.x, 'l': ns.x} %}", "{% set y %}"),
    *(
        "{% endset %}",
        "{{ y }}",
        "{% set ns.x = y %}",
        "{{ ns.x | join(ns.x) }}",
        "{{ y | indent }}",
    ),
    *("{% macro m(a) %}", "{% endmacro %}", "{{ m(ns.x) }}", "{{ m(m) }}", "{% set ns.x = m(y) %}"),
    *("{{ y.replace('a', y) }}", "{{ y.split('a') }}", "{{ '%99999d' % 1 }}", "{% raw %}", "{#"),
    *("{{ messages | map('string') | list }}", "{{ ns.x | map('center', 9999) | join }}", "a" * 99),
    *(
        "{{ '{:9999}'.format(1) * 999 }}",
        "{{ y | wordwrap(1) }}",
        "{{ ns.x | sort | unique | list }}",
    ),
    *("{{ ns.x | sum(start=[]) }}", "{{ 7 ** 9999 }}", "{% generation %}", "{% endgeneration %}"),
    *(
        "{% for a in messages recursive %}",
        "{{ loop(messages) }}",
        "{{ loop.nextitem }}",
        "{{ ((((",
    ),
    *(
        "{% set ns = namespace(x='ab', n=ns) %}",
        "{% continue %}",
        "{{ ns.x == ns.x[:] }}",
        "%}",
        "{%",
    ),
)


def template_of(rng: random.Random) -> str:
    """Parts in any order, most of the opened ones closed."""
    text, ends = "{% set ns = namespace(x='ab') %}{% set y = 'a' %}", []
    for _ in range(rng.randint(2, 24)):
        part = rng.choice(PARTS)
        if part.startswith(("{% end",)) and rng.random() < 0.9:
            part = ends.pop() if ends else ""
        elif part.startswith(("{% for", "{% if", "{% macro", "{% generation")):
            ends.append("{% end" + part.split()[1] + " %}")
        elif part == "{% set y %}":
            ends.append("{% endset %}")
        text += part
    return text + "".join(reversed(ends))


def test_templates_of_any_parts_end_in_time_and_in_one_line() -> None:
    """Each may take the two seconds of its budget, and hardly any does."""
    outcomes = set()
    for seed in range(CASES * 2):
        template = template_of(random.Random(seed))
        single = time.monotonic()
        try:
            render_chat(
                template,
                [{"role": "user", "content": "Hi"}] * 3,
                special_tokens={},
                add_generation_prompt=True,
            )
            outcomes.add(True)
        except OmniDraftError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, template
            outcomes.add(False)
        assert time.monotonic() - single < 8, template
    assert outcomes == {True, False}
