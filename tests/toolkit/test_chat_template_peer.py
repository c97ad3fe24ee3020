"""Templates render as in transformers: constructs one by one, then whole public styles."""

import datetime
import json
from typing import Any

import pytest
from shared_files import shared_path

from omnidraft_npu.errors import PromptError
from omnidraft_npu.text.chat_template import render_chat
from omnidraft_npu.text.tokenizer import Tokenizer

peer = pytest.importorskip("transformers.utils.chat_template_utils")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "[SEP]", "image_token": "<img>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Tells the wéather "now" & <here>',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
DOCUMENTS = [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <b> & 'you' \"there\"  "}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Name two\n\nrivers. "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nRhine, Elbe"},
        {"role": "user", "content": "More"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None},
        {"role": "tool", "content": "sunny", "name": "weather"},
    ],
    "reasoned": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2", "reasoning": "add them"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}],
}

CONSTRUCTS = [
    "{% if tools is not none %}TOOLS{% endif %}{{ messages[0].content }}",
    "{{ tools }}|{{ documents }}",
    "{{ tools is defined }} {{ documents is defined }} {{ other is defined }}",
    "{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ image_token }}{{ cls_token }}",
    "{{ add_generation_prompt }}",
    "{{ messages | tojson }}",
    "{{ messages[0] | tojson(ensure_ascii=true) }}",
    "{{ {'é': '日<&>'} | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': [1, 2]} | tojson(sort_keys=true) }}",
    "{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }}",
    "{{ {'b': 1, 'a': [1, {}]} | tojson(indent=4, separators=(', ', ' = '), sort_keys=true) }}",
    "{{ 'x' | tojson(false, 2) }}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}",
    "a{%- generation -%} b {%- endgeneration -%} c",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}"
    "{% endfor %}",
    "{% for i in [1, 2, 3] %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{{ strftime_now('%Y-%m-%d') }}",
    "{{ raise_exception('roles must\\nalternate') }}",
    "  {% if true %}\n  x\n  {% endif %}\ny\n",
    "{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n",
    "{%- for m in messages -%} {{- m['role'] -}} {%- endfor -%}",
    "{{ messages[0]['content'] | trim }}",
    "{{ messages[0]['content'].strip() }}.",
    "{{ messages[-1].content[0] }}{{ messages[-1].content[-1] }}",
    "{{ messages | length }}{{ messages | count }}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.revindex }}{{ loop.previtem.role }}{{ loop.nextitem.role }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.role }}{% else %}none"
    "{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.role }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in messages[0] %}{{ k }}{% endfor %}{{ messages[0] | list }}",
    "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.found }}",
    "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "{% set ns = namespace(self=1, x=2) %}{{ ns.x }}",
    "{% macro m(a, b='c') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{{ m(1) }}{{ m(1, 2, 3, d=4) }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}",
    "{% set x %}a{{ messages[0].role }}b{% endset %}{{ x | upper }}",
    "{% filter upper %}abc{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}",
    "{% raw %}{{ x }}{% endraw %}",
    "{# nothing #}x",
    "{{ 'a' ~ 1 ~ none ~ [1] ~ true }}",
    "{{ 'a' + 'b' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 7 / 2 }}{{ -3 + 1.5 }}",
    "{{ [1, 2] + [3] }}{{ (1, 2) }}{{ {'a': 1} }}{{ [1] * 2 }}",
    "{{ '%s is %5.2f and %d' % ('x', 1.5, 3) }}{{ '%s' % 'y' }}",
    "{{ '%s-%s' | format('a', 2) }}{{ '{} {b:>5}'.format(1, b=2) }}",
    "{{ 'x' if messages | length > 1 else 'y' }}{{ 'z' if false }}",
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% if messages | selectattr('role', 'equalto', 'nobody') %}always{% endif %}",
    "{{ (messages | rejectattr('role', 'in', ['user']) | list)[0].role }}",
    "{{ messages | first | tojson }}{{ (messages | last).role }}",
    "{{ [3, 1, 2] | sort }}{{ [3, 1] | max }}{{ [3, 1] | min }}{{ [3, 1] | sum }}",
    "{{ ['a', 'b', 'a'] | unique | list }}{{ 'abc' | reverse }}{{ [1, 2] | reverse | list }}",
    "{{ 'abc' | replace('b', 'xx') }}{{ 'abc'.replace('b', '') }}",
    "{{ 'a b c'.split(' ') }}{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}",
    "{{ 'x\\ny' | indent(4) }}|{{ 'x\\ny' | indent(2, true) }}|{{ 'x' | center(9) }}|",
    "{{ 'some words go here' | wordwrap(9) }}{{ 'long text' | truncate(6) }}",
    "{{ ' x '.rstrip() }}{{ 'abc'.startswith('a') }}{{ 'abc'.endswith(('b', 'c')) }}",
    "{{ 'ab'.upper() }}{{ 'ab' | capitalize }}{{ 'a b' | title }}{{ 'AB' | lower }}",
    "{{ '3' | int + 1 }}{{ '2.5' | float }}{{ 3.7 | round }}{{ 3.14159 | round(2) }}",
    "{{ nothing | default('d') }}{{ '' | default('e', true) }}{{ none | d('f') }}",
    "{{ messages[0].content is string }}{{ messages is iterable }}{{ messages[0] is mapping }}"
    "{{ 1 is number }}{{ none is none }}{{ 2 is even }}{{ [] is sequence }}",
    "{{ 'a' in 'abc' }}{{ 'role' in messages[0] }}{{ 1 not in [1] }}",
    "{{ messages[0].get('missing', 'no') }}{{ messages[0].missing }}",
    "{{ messages[0].missing.deeper }}",
    "{{ dict(a=1, b=2) }}{{ dict([('x', 1)]) | tojson }}",
    "{{ range(3) | list }}{% for i in range(2, 8, 3) %}{{ i }}{% endfor %}",
    "{{ {'b': 2, 'a': 1} | dictsort }}{{ {'a': 1} | items | list }}",
    "{{ [1, 2, 3, 4] | batch(3, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}",
    "{{ [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}] | groupby('a') | list | length }}",
    "{{ '<a>' | e }}{{ '<a>' | safe }}{{ 'a b' | urlencode }}{{ 'a b c' | wordcount }}",
    "{{ cycler('a', 'b').next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}",
    "{{ messages[1:] | length }}{{ messages[:1] | length }}{{ 'abcdef'[1:4] }}",
    "{% autoescape true %}{{ '<' ~ 'b' }}{% endautoescape %}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "{{ messages[0].thinking }}{{ messages[-1].reasoning_content }}{{ messages[-1].reasoning }}",
    "{% if messages[-1].tool_calls %}{{ messages[-1].tool_calls }}{% endif %}",
    "{% if messages[1] is defined and messages[1].content is defined %}c{% else %}n{% endif %}",
    "{{ enable_thinking is defined and enable_thinking is false }}",
    "{% do x %}",
    "{% if %}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'secret' %}",
    "{{ undefined_function() }}",
]

STYLES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama 2": "{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.first = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token ~ '[INST] ' ~ ns.first ~ "
    "m.content.strip() ~ ' [/INST]' }}{% set ns.first = '' %}{% elif m.role == 'assistant' %}"
    "{{ ' ' ~ (m.content or '') | trim ~ ' ' ~ eos_token }}{% endif %}{% endfor %}",
    "llama 3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\\n\\n' }}{% if m.tool_calls is defined %}{{ m.tool_calls[0].function "
    "| tojson }}{% elif m['content'] is string %}{{ m['content'] | trim }}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{% set start = "
    "messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}{% else %}{% set start = '' %}"
    "{% set turns = messages %}{% endif %}{% for m in turns %}{% if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ start if loop.first }}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{{ '<img>' if part.type == 'image' else part.text | trim }}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi 3": "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' }}{{ m['content'] }}"
    "{{ '<|end|>\\n' }}{% endfor %}{{ '<|assistant|>\\n' if add_generation_prompt }}",
    "mistral 1": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ m['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles') }}"
    "{% endif %}{% endfor %}",
    "mistral 3": "{{ bos_token }}{% set last = messages | length - 1 %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if loop.index0 == last and tools %}[AVAILABLE_TOOLS] ["
    "{% for t in tools %}{{ t | tojson }}{{ ', ' if not loop.last }}{% endfor %}]"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls is defined %}"
    "[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ {'content': m.content} | tojson }}"
    "[/TOOL_RESULTS]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}\n{% if m['role'] in ['user', 'system', 'assistant'] %}\n"
    "{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{% endfor %}",
    "vicuna": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}A chat "
    "between a user and an assistant.{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ ' USER: ' ~ m.content | trim }}{% elif m.role == 'assistant' %}{{ ' ASSISTANT: ' ~ "
    "m.content ~ eos_token }}{% endif %}{% endfor %}{{ ' ASSISTANT:' if add_generation_prompt }}",
    "qwen 3": "{%- if tools %}\n    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}\n"
    "    {%- for tool in tools %}\n        {{- '\\n' }}\n        {{- tool | tojson }}\n"
    "    {%- endfor %}\n    {{- '\\n</tools><|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- set ns = namespace(last=messages | length - 1) %}\n"
    "{%- for m in messages[::-1] %}\n    {%- if m.role == 'user' %}\n"
    "        {%- set ns.last = messages | length - 1 - loop.index0 %}\n        {%- break %}\n"
    "    {%- endif %}\n{%- endfor %}\n{%- for m in messages %}\n"
    "    {%- if m.content is string %}\n        {%- set text = m.content %}\n"
    "    {%- else %}\n        {%- set text = '' %}\n    {%- endif %}\n"
    "    {%- set thought = m.reasoning_content or '' %}\n"
    "    {%- if '</think>' in text %}\n"
    "        {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}\n"
    "        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}\n    {%- endif %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' }}\n"
    "    {%- if thought and loop.index0 > ns.last %}\n"
    "        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}\n    {%- endif %}\n"
    "    {{- text + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}",
    "deepseek": "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}"
    "{% endfor %}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<｜User｜>' + m['content'] }}{% elif m['role'] == 'assistant' and m['content'] is defined "
    "%}{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end｜>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
    "command r": "{{ bos_token }}{% if documents %}{% for d in documents %}Document: "
    "{{ loop.index0 }}\n{% for k, v in d | dictsort %}{{ k }}: {{ v }}\n{% endfor %}{% endfor %}"
    "{% endif %}{% macro turn(role, text) %}<|START_OF_TURN|><|{{ role | upper }}|>{{ text }}"
    "<|END_OF_TURN|>{% endmacro %}{% for m in messages %}"
    "{{ turn({'assistant': 'chatbot'}.get(m.role, m.role), m.content | default('') | string "
    "| trim) }}{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN|><|CHATBOT|>{% endif %}",
    "falcon": "{% for m in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ m.role | capitalize }}: {{ m.content }}{% endfor %}{{ '\\nFalcon:' }}",
}


def outcome(render: Any) -> str | None:
    """What is rendered; None for a refusal, whatever its class."""
    try:
        return str(render())
    except Exception:  # noqa: BLE001, any of the template's own
        return None


def assert_same(template: str, chat: list[dict[str, Any]], **given: Any) -> str | None:
    def theirs() -> Any:
        normal = peer._normalize_chat_messages(chat)
        return peer.render_jinja_template(
            [normal], chat_template=template, add_generation_prompt=True, **SPECIAL, **given
        )[0][0]

    def ours() -> str:
        kwargs = dict(given)
        tools, documents = kwargs.pop("tools", None), kwargs.pop("documents", None)
        return render_chat(
            template,
            chat,
            special_tokens=SPECIAL,
            add_generation_prompt=True,
            tools=tools,
            documents=documents,
            variables=kwargs,
        )

    expected = outcome(theirs)
    assert outcome(ours) == expected
    return expected


@pytest.mark.parametrize("template", CONSTRUCTS)
def test_a_construct_renders_as_in_transformers(template: str) -> None:
    for chat in CHATS.values():
        assert_same(template, chat)


@pytest.mark.parametrize("style", STYLES)
def test_a_public_style_renders_as_in_transformers(style: str) -> None:
    shown = [assert_same(STYLES[style], chat) for chat in CHATS.values()]
    shown += [assert_same(STYLES[style], CHATS["tools"], tools=TOOLS)]
    shown += [assert_same(STYLES[style], CHATS["system"], documents=DOCUMENTS)]
    shown += [assert_same(STYLES[style], CHATS["one"], enable_thinking=False)]
    assert any(shown)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "smollm2"])
def test_a_published_template_renders_as_in_transformers(name: str) -> None:
    folder = shared_path(f"tokenizers/{name}")
    ours = Tokenizer.from_folder(folder)
    template = ours.config["chat_template"]
    special = {
        key: value if isinstance(value, str) else value["content"]
        for key, value in json.loads((folder / "tokenizer_config.json").read_text()).items()
        if key.endswith("_token") and value and not isinstance(value, bool)
    }
    now = datetime.datetime.now()
    for chat in CHATS.values():
        for given in ({}, {"tools": TOOLS}):

            def theirs(chat: Any = chat, given: Any = given) -> Any:
                return peer.render_jinja_template(
                    [peer._normalize_chat_messages(chat)],
                    chat_template=template,
                    add_generation_prompt=True,
                    **special,
                    **given,
                )[0][0]

            def mine(chat: Any = chat, given: Any = given) -> str:
                return ours.apply_chat_template(chat, now=now, **given)

            assert outcome(mine) == outcome(theirs)


@pytest.mark.parametrize("style", ["chatml", "llama 3", "gemma", "vicuna"])
@pytest.mark.parametrize("content", ["The Rhine and ", "end", " both "])
def test_the_last_message_is_continued_as_in_transformers(style: str, content: str) -> None:
    chat = [{"role": "user", "content": "Name"}, {"role": "assistant", "content": content}]
    expected = peer.render_jinja_template(
        [chat], chat_template=STYLES[style], continue_final_message=True, **SPECIAL
    )[0][0]
    shown = render_chat(
        STYLES[style],
        chat,
        special_tokens=SPECIAL,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert shown == expected


def test_only_a_text_can_be_continued() -> None:
    for chat, opens in (([], False), ([{"role": "user"}], False), (CHATS["one"], True)):
        with pytest.raises(PromptError, match="cannot be continued"):
            render_chat(
                STYLES["chatml"],
                chat,
                special_tokens={},
                add_generation_prompt=opens,
                continue_final_message=True,
            )
