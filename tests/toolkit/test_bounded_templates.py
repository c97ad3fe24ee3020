"""No template crashes, hangs or fills the memory: each is one line, within a bounded time."""

import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from omnidraft_npu.errors import PromptError
from omnidraft_npu.text.bounded_templates import MAX_SECONDS, MAX_SOURCE
from omnidraft_npu.text.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "Hi"}]
GROWING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)
LONG = "{% set x = 'a' * 2000000 %}"


def growing(step: str, shown: str = "ns.x") -> str:
    return GROWING.replace("STEP", step) + "{{ " + shown + " }}"


BROKEN = [
    "{% break %}",
    "{% continue %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% block b %}{{ self.b() }}{% endblock %}",
    "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "{{ " + "[" * 500 + "1" + "]" * 500 + " }}",
    "{{ 1" + " + 1" * 5000 + " }}",
    "{{ x" + ".y" * 3000 + " }}",
    "{{ " + "not " * 3000 + "x }}",
    "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "{% if true %}" * 120 + "{% endif %}" * 120,
    "{{ 1() }}",
    "{{ 'a' | nothing }}",
    "{{ 'a' is nothing }}",
    "{{ 1 // 0 }}",
    "{{ 2.0 ** 5000 }}",
    "{{ range(10 ** 10) }}",
    "{{ {[]: 1} }}",
    "{% for i in 3 %}{% endfor %}",
    "{{ strftime_now(3) }}",
    "{{ raise_exception() }}",
    "{{ '%s %s' % 'a' }}",
    "{{ messages | tojson(indent='x' * 10 ** 9) }}",
    "{{ lipsum(10 ** 9) }}",
]

LARGE = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * 'a' }}",
    "{{ [1] * 10 ** 10 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%-1000000000s' % 'a' }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format('a') }}",
    "{{ '{:>{}}'.format('a', 10 ** 9) }}",
    "{{ '{0:{1}}'.format('a', 1000000000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ ('{:99999}' * 10000).format(*range(10000)) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.rjust(width=10 ** 9) }}",
    "{{ 'a'.zfill(10 ** 9) }}",
    "{{ 'a' | indent(10 ** 9, true) }}",
    "{{ ('a\\n' * 100000) | indent(100000) }}",
    "{{ ('a\\n' * 1000) | indent('x' * 1000000) }}",
    "{{ ('a' * 60000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "{{ ('a' * 1000000) | wordwrap(3) }}",
    "{{ ('a\\t' * 1000000).expandtabs(1000000) }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000).replace('', 'y' * 1000000) }}",
    "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000).join('y' * 1000000) }}",
    "{{ range(99999) | join('x' * 1000000) }}",
    "{{ range(9999) | map('string') | join('x' * 1000000) }}",
    "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "{{ [1] | slice(10 ** 9) | list }}",
    "{{ range(20000) | batch(1) | sum(start=[]) | length }}",
    "{{ [[[1] * 1000] * 1000] * 1000 }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ ([1] * 9000) | tojson(separators=('x' * 100000, ':')) }}",
    "{% set ns = namespace(x=range(8000) | list) %}{% for i in range(90) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=300) }}",
    "{{ ('<' * 1000000) | striptags }}",
    "{{ ('a.com ' * 100000) | urlize }}",
    "{{ (range(99999) | list) | pprint }}",
    "{{ dict.fromkeys(range(9999), range(9999) | list) }}",
    growing("ns.x + ns.x"),
    growing("ns.x ~ ns.x"),
    growing("[ns.x, ns.x]"),
    growing("(ns.x, ns.x)", "ns.x == ns.x"),
    growing("{'a': ns.x, 'b': ns.x}", "ns.x | tojson"),
    growing("dict(a=ns.x, b=ns.x)"),
    growing("ns.x.replace('a', ns.x)"),
    growing("ns.x | replace('a', ns.x)"),
    growing("ns.x % (ns.x) if false else '%s%s' % (ns.x, ns.x)"),
    growing("'{0}{0}'.format(ns.x)"),
    growing("'{x}{x}' | replace('{x}', ns.x)"),
    growing("ns.x | list + ns.x | list"),
    growing("ns.x * 2"),
    growing("[ns.x, ns.x] | join"),
    growing("ns.x | map('string') | join(ns.x)"),
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"
    "{{ ns.n }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}{{ ns.x }}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + growing("m(ns.x)"),
    "{% for i in range(99999) %}" + "x" * 50_000 + "{% endfor %}",
    "{% macro m() %}{% for i in range(99999) %}" + "x" * 50_000 + "{% endfor %}{% endmacro %}"
    "{{ m() | length }}",
    "{{ '😀' * 10 ** 8 }}",
    "{{ 'x' * 3000000 }}{{ 'x' * 3000000 }}",
    "x" * (MAX_SOURCE + 1),
]

SLOW = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 1 }}{% endfor %}{% endfor %}",
    LONG + "{% for c in x %}{% for d in x %}{% endfor %}{% endfor %}",
    LONG + "{% for c in x %}{% if x[1:] == x %}{% endif %}{% endfor %}",
    LONG + "{% for c in x %}{% if 'aab' in x %}{% endif %}{% endfor %}",
    LONG + "{% for c in x %}{% if x.count('b') %}{% endif %}{% endfor %}",
    LONG + "{% for c in x if x.upper() %}{% endfor %}",
    LONG + "{{ x | select('in', x) | list }}",
    LONG + "{{ x | map('replace', 'a', x) | list }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{{ range(99999) | map('center', 1000000) | list }}",
    "{{ (range(99999) | list) | select('in', range(99999) | list) | list }}",
    "{% set x = range(99999) | list %}{% for i in x %}{% if x == x[:] %}{% endif %}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% for i in range(99999) %}{{ messages | tojson * 1000 }}{% endfor %}",
]


@pytest.mark.parametrize("template", [*BROKEN, *LARGE], ids=lambda template: template[:60])
def test_a_template_that_breaks_or_swells_is_one_line(template: str) -> None:
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(PromptError, match="--raw") as caught:
            render_chat(template, MESSAGES, special_tokens={}, add_generation_prompt=True)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert most < 300e6
    assert time.monotonic() - began < 4 * MAX_SECONDS  # tracing is slow


@pytest.mark.slow
@pytest.mark.parametrize("template", SLOW, ids=lambda template: template[:60])
def test_a_template_that_runs_for_long_is_stopped(template: str) -> None:
    began = time.monotonic()
    with pytest.raises(PromptError, match=r"it takes more than 2 s|it makes a value") as caught:
        render_chat(template, MESSAGES, special_tokens={}, add_generation_prompt=True)
    assert time.monotonic() - began < 2 * MAX_SECONDS
    assert "\n" not in str(caught.value)


def test_nested_loops_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnidraft_npu.text.bounded_templates.MAX_SECONDS", 0.1)
    with pytest.raises(PromptError, match=r"it takes more than 0.1 s"):
        render_chat(SLOW[0], MESSAGES, special_tokens={}, add_generation_prompt=True)


def test_what_one_template_spent_is_not_missing_in_the_next_rendering() -> None:
    template = "{% for i in range(99999) %}{% endfor %}{{ ('x' * 1000000) | length }}"
    for _ in range(12):
        shown = render_chat(template, MESSAGES, special_tokens={}, add_generation_prompt=True)
        assert shown == "1000000"


def test_a_long_conversation_is_rendered() -> None:
    """Limits grow with what is given: 4,000 messages, and one of 5 MB."""
    template = (
        "{% for m in messages %}{% if loop.index0 and messages[loop.index0 - 1].role == m.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<' + m.role + '>' ~ m.content.split('</think>')[-1].strip() }}"
        "{{ messages | length }}{% endfor %}{{ messages | tojson }}"
    )
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": f"word {i} " * 9} for i in range(4000)
    ]
    text = render_chat(template, turns, special_tokens={}, add_generation_prompt=True)
    assert text.count("word 3999") == 18
    large = [{"role": "user", "content": "12345" * 1_000_000}]
    text = render_chat(template, large, special_tokens={}, add_generation_prompt=True)
    assert text.count("12345") == 2_000_000


def test_nothing_is_written_about_odd_templates() -> None:
    """Python warns of calls like ``1()`` in the code that jinja writes."""
    code = (
        "from omnidraft_npu.text.chat_template import render_chat\n"
        "try: render_chat('{{ 1() }}', [], special_tokens={}, add_generation_prompt=True)\n"
        "except ValueError: print('refused')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=True
    )
    assert found.stdout == "refused\n"
    assert found.stderr == ""
