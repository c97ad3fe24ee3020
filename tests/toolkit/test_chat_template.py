"""Chat templates render what published models expect, and nothing else."""

import re

import pytest

from omnidraft_npu.errors import PromptError
from omnidraft_npu.text.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "1 < 2 & 'x'"}]


def render(template: str, add_generation_prompt: bool = True) -> str:
    return render_chat(
        template,
        MESSAGES,
        special_tokens={"bos_token": "<s>"},
        add_generation_prompt=add_generation_prompt,
    )


def test_text_is_not_escaped() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}") == "<s>1 < 2 & 'x'"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "1 < 2 & \'x\'"}'


def test_json_keeps_letters_as_they_are() -> None:
    assert render("{{ {'é': '日'} | tojson }}") == '{"é": "日"}'


def test_blocks_leave_no_lines_and_no_indent() -> None:
    template = "{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\ny"
    assert render(template) == "x\ny"


def test_generation_prompt_can_be_left_out() -> None:
    template = "a{% if add_generation_prompt %}b{% endif %}"
    assert render(template) == "ab"
    assert render(template, add_generation_prompt=False) == "a"


def test_loop_controls_and_dates_are_there() -> None:
    assert render("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


def test_undefined_names_are_empty() -> None:
    assert render("{% if other %}x{% endif %}{{ other }}") == ""


def test_a_refusal_of_the_template_is_shown() -> None:
    with pytest.raises(PromptError, match="cannot render this conversation: roles must alternate"):
        render("{{ raise_exception('roles must\\nalternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ other.name }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ render.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'secret' %}",
        "{{ '%x' | format('a') }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_broken_or_hostile_template_is_an_error_in_one_line(template: str) -> None:
    with pytest.raises(PromptError, match="--raw") as caught:
        render(template)
    assert "\n" not in str(caught.value)
