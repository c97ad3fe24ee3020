"""Content that spells a control token is text; a template's own control tokens are control."""

import functools
import itertools
import json
import random
import re
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_files import shared_path
from tiny_tokenizers import SPECIAL, byte_level, space_mark, tokenizer

from omnidraft_npu.errors import PromptError
from omnidraft_npu.text.tokenizer import Tokenizer

NAMES = ["llama2", "llama3", "qwen3", "gemma3", "smollm2"]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATTERNS = ["{}", "a{}b", " {} ", "x {}\n\n{}y", "<{}>", "{} two  spaces\n\n\n", "{0}{0}", "|{}|"]


def with_markup(document: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """The document with the control tokens of ChatML."""
    first = 1 + max(document["model"]["vocab"].values())
    added = [
        {"id": first + i, "content": content, **SPECIAL, "special": True, **flags}
        for i, content in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    document["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
    return document | {"added_tokens": [*document["added_tokens"], *added]}


KINDS = {
    "byte level": with_markup(byte_level()),
    "space mark": with_markup(space_mark()),
    "stripping": with_markup(byte_level(), rstrip=True, lstrip=True),
    "normalized": with_markup(byte_level(), normalized=True),
    "first space": with_markup(
        space_mark()
        | {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "first",
                "split": False,
            },
        }
    ),
}


def library(document: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(document))


@functools.cache
def published(name: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    folder = shared_path(f"tokenizers/{name}")
    return (
        Tokenizer.from_folder(folder),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )


def special_texts(backend: tokenizers.Tokenizer) -> list[str]:
    return [t.content for t in backend.get_added_tokens_decoder().values() if t.special][:24]


def by_segments(backend: tokenizers.Tokenizer, parts: list[tuple[str, bool]]) -> list[int]:
    """Ids from the library alone: control tokens by name, all between them as one text."""
    ids: list[int] = []
    backend.encode_special_tokens = True
    for is_control, group in itertools.groupby(parts, key=lambda part: part[1]):
        text = [part for part, _ in group]
        if is_control:
            ids += [backend.token_to_id(token) for token in text]
        else:
            ids += backend.encode("".join(text), add_special_tokens=False).ids
    backend.encode_special_tokens = False
    return ids


def test_a_typed_control_token_of_smollm2_is_seven_ids_none_special() -> None:
    ours, _ = published("smollm2")
    ids = ours.encode("<|im_end|>", add_special=False, parse_special=False)
    assert len(ids) == 7
    assert ours.special_ids.isdisjoint(ids)
    inside = ours.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert sum(i in ours.special_ids for i in inside) == 5  # two turns of the template, one open
    assert ours.decode(inside, skip_special=False).count("<|im_end|>") == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_text_equals_the_librarys_without_special_tokens(name: str) -> None:
    ours, backend = published(name)
    specials = special_texts(backend)
    backend.encode_special_tokens = True
    for pattern, special in itertools.product(PATTERNS, specials):
        text = pattern.format(special, special)
        ids = ours.encode(text, add_special=False, parse_special=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "smollm2"])
def test_a_conversation_equals_the_librarys_at_every_place(name: str) -> None:
    """The published templates; content at the borders of template text merges as the library's."""
    ours, backend = published(name)
    specials = special_texts(backend)
    rng = random.Random(5)
    whole = re.compile("|".join(map(re.escape, specials)))
    some = rng.sample(specials, min(8, len(specials)))
    for pattern, special in itertools.product(PATTERNS, some):
        content = pattern.format(special, special)
        neutral = whole.sub("\ufffe", content)
        for chat in (
            [{"role": "user", "content": "MARK"}],
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "MARK"},
                {"role": "user", "content": "MARK"},
            ],
        ):

            def filled(text: str, chat: Any = chat) -> list[dict[str, str]]:
                return [m | {"content": m["content"].replace("MARK", text)} for m in chat]

            rendered = ours.apply_chat_template(filled(neutral))
            parts = [
                (part.replace("\ufffe", special), part in specials)
                for part in re.split(f"({whole.pattern})", rendered)
                if part
            ]
            assert ours.encode_chat(filled(content)) == by_segments(backend, parts)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "smollm2"])
def test_content_without_control_tokens_gives_the_ids_of_the_rendered_text(name: str) -> None:
    ours, backend = published(name)
    for content in (
        "Hello",
        " a  b\n\n\nc ",
        "<b>&</b>",
        "x<",
        ">y",
        "日本 😀",
        "def f():\n    pass",
    ):
        chat = [{"role": "user", "content": content}]
        rendered = ours.apply_chat_template(chat)
        expected = backend.encode(rendered, add_special_tokens=False).ids
        assert ours.encode_chat(chat) == expected
        assert ours.encode_chat(chat, parse_special=True) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_content_of_any_shape_is_ever_a_control_token(kind: str, data: st.DataObject) -> None:
    document = KINDS[kind]
    ours = tokenizer(document, chat_template=CHATML)
    word = st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|>", " ", "\n", "a", "日", "<s>"]
    )
    texts = data.draw(st.lists(st.lists(word, max_size=6).map("".join), min_size=1, max_size=3))
    chat = [{"role": "user", "content": text} for text in texts]
    ids = ours.encode_chat(chat)
    first = document["added_tokens"][-2]["id"]
    markup = [i for i in ids if i >= first]
    assert markup == [first, first + 1] * len(texts) + [first]
    assert 260 not in ids[1:] or kind == "byte level"
    shown = ours.decode(ids, skip_special=False)
    if kind == "byte level":
        assert shown == ours.apply_chat_template(chat)


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        ("{{ messages[0].content }}{{ messages[1].content }}", ("<|im_", "end|>")),
        ("{{ messages[0].content | trim }}{{ messages[1].content | trim }}", ("<|im_ ", " end|>")),
        ("{{ messages | map(attribute='content') | join }}", ("<", "|im_end|>")),
    ],
)
def test_a_control_token_that_the_template_joins_from_contents_is_text(
    template: str, chat: tuple[str, ...]
) -> None:
    ours = tokenizer(KINDS["byte level"], chat_template=template)
    ids = ours.encode_chat([{"role": "user", "content": text} for text in chat])
    assert ours.decode(ids) == "<|im_end|>"


def test_a_control_token_that_the_template_builds_around_a_role_is_control() -> None:
    ours = tokenizer(
        KINDS["byte level"],
        chat_template="{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}",
    )
    ids = ours.encode_chat([{"role": "im_end", "content": "a<|im_end|>"}])
    assert [i in ours.special_ids for i in ids].count(True) == 1
    assert ours.decode(ids) == "a<|im_end|>"


@pytest.mark.parametrize(
    "expression",
    [
        "m.content | trim",
        "m.content[0] ~ m.content[1:]",
        "m.content[:3] ~ m.content[3:]",
        "m.content.split('<|im_end|>') | join('<|im_end|>') if false else m.content",
        "m.content if m.content | length == LENGTH else raise_exception('length')",
        "m.content if '<|im_end|>' in m.content else m.content[1:]",
        "m.content if m.content.startswith('<') else raise_exception('start')",
        "m.content if m.content.endswith('>') else raise_exception('end')",
        "{'a': m.content} | tojson",
        "{'a': m.content} | tojson(ensure_ascii=true)",
        "m.content | upper | lower",
        "m | tojson",
        "m.content.split('</think>')[-1]",
    ],
)
def test_what_templates_do_with_strings_goes_on_as_if_nothing_was_marked(expression: str) -> None:
    content = "<|im_end|>" + "b" * 8 + "<|im_end|>"
    template = "{% for m in messages %}<|im_start|>{{ X }}{% endfor %}"
    template = template.replace("X", expression.replace("LENGTH", str(len(content))))
    ours = tokenizer(KINDS["byte level"], chat_template=template)
    chat = [{"role": "user", "content": content}]
    ids = ours.encode_chat(chat)
    assert [i in ours.special_ids for i in ids].count(True) == 1
    assert ours.decode(ids, skip_special=False) == ours.apply_chat_template(chat)


def test_thinking_that_a_template_strips_is_stripped_though_its_marks_are_special() -> None:
    document = with_markup(byte_level())
    first = 1 + document["added_tokens"][-1]["id"]
    more = {"id": first, "content": "</think>", **SPECIAL, "special": True}
    document["model"]["vocab"]["</think>"] = first
    document["added_tokens"] = [*document["added_tokens"], more]
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    )
    ours = tokenizer(document, chat_template=template)
    ids = ours.encode_chat([{"role": "assistant", "content": "hm</think>two<|im_end|>"}])
    assert ours.decode(ids) == "two<|im_end|>"


def test_content_that_a_template_rewrites_beyond_recognition_is_refused() -> None:
    template = "{{ messages[0].content | reverse }}{{ messages[0].content | length }}"
    ours = tokenizer(
        KINDS["byte level"], chat_template=template + "{{ messages[0].content[4] }}" * 3
    )
    chat = [{"role": "user", "content": "a<|im_end|>" * 2}]
    assert ours.decode(ours.encode_chat(chat)).startswith(">|dne_mi|<a")
    hashed = "{% set ns = namespace(t='') %}{% for c in messages[0].content %}" + (
        "{% if c in 'im_end<|>' %}{% set ns.t = ns.t + c %}{% endif %}{% endfor %}{{ ns.t }}"
    )
    ours = tokenizer(KINDS["byte level"], chat_template=hashed)
    with pytest.raises(
        PromptError, match=r"spells the control token '<\|im_end\|>'.*--parse-special"
    ):
        ours.encode_chat([{"role": "user", "content": "<|im_end|>"}])


def test_system_prompts_tools_documents_and_arguments_are_content_too() -> None:
    template = (
        "<|im_start|>{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}{{ extra }}"
    )
    ours = tokenizer(KINDS["byte level"], chat_template=template)
    typed = "<|im_end|>"
    call = {"function": {"name": typed, "arguments": {typed: [typed, {"x": typed}]}}}
    ids = ours.encode_chat(
        [
            {"role": "system", "content": typed},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": typed}]},
        ],
        tools=[{"name": typed}],
        documents=[{"text": typed}],
        variables={"extra": typed},
    )
    assert [i in ours.special_ids for i in ids].count(True) == 1
    assert ours.decode(ids).count(typed) == 9


def test_the_time_of_a_template_is_the_same_in_both_renderings() -> None:
    template = "{{ strftime_now('%H:%M:%S.%f') }}<|im_start|>{{ messages[0].content }}"
    ours = tokenizer(KINDS["byte level"], chat_template=template)
    for _ in range(20):
        assert ours.encode_chat([{"role": "user", "content": "<|im_end|>"}])


def test_control_tokens_are_parsed_where_they_are_asked_for() -> None:
    ours = tokenizer(KINDS["byte level"], chat_template=CHATML)
    chat = [{"role": "user", "content": "<|im_end|>"}]
    parsed = ours.encode_chat(chat, parse_special=True)
    assert parsed == ours.encode(ours.apply_chat_template(chat), add_special=True)
    assert [i in ours.special_ids for i in parsed].count(True) == 4
    assert len(ours.encode("<|im_end|>", add_special=False)) == 1


def test_added_tokens_that_are_not_special_are_found_in_content() -> None:
    ours = tokenizer(KINDS["byte level"], chat_template=CHATML)
    ids = ours.encode_chat([{"role": "user", "content": "<think><|im_end|>"}])
    assert 258 in ids


def test_the_first_token_is_there_once_whether_the_template_writes_it_or_not() -> None:
    document = KINDS["space mark"]
    for template in (CHATML, CHATML.removeprefix("{{ bos_token }}")):
        ours = tokenizer(document, chat_template=template, bos_token="<s>")
        for content in ("a", "<s>", "<|im_end|>", "<s><s>"):
            ids = ours.encode_chat([{"role": "user", "content": content}])
            assert ids[0] == 260
            assert ids.count(260) == 1
    ours = tokenizer(document, chat_template="{{ messages[0].content }}", bos_token="<s>")
    assert ours.encode_chat([{"role": "user", "content": "<s>"}]).count(260) == 1


def test_a_private_character_in_the_content_stays_as_it_is() -> None:
    ours = tokenizer(KINDS["byte level"], chat_template=CHATML)
    content = "\U00100000<|im_end|>\U00100001\U000f0000\U000f0001qJv0zXkkXz0vJq"
    ids = ours.encode_chat([{"role": "user", "content": content}])
    assert content in ours.decode(ids)
    assert [i in ours.special_ids for i in ids].count(True) == 3


def test_a_tokenizer_that_makes_a_control_token_of_any_text_is_reported() -> None:
    document = byte_level()
    document["model"] |= {"ignore_merges": True}
    document["pre_tokenizer"] = document["pre_tokenizer"] | {"use_regex": False}
    ours = tokenizer(document)
    with pytest.raises(PromptError, match="'<eos>', which this tokenizer sees in any text"):
        ours.encode("<eos>", add_special=False, parse_special=False)
