"""Chat templates, rendered as transformers does, where one from a stranger can do no harm."""

import datetime
import functools
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..documents import shown_text
from ..errors import PromptError

if TYPE_CHECKING:
    import jinja2

    from .bounded_templates import BoundedEnvironment

_SHOWN = 300
_RAW = ": use --raw to send the prompt as it is"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_HERE = "d41d8cd9 the answer goes on here"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
) -> str:
    """The prompt text that a jinja `template` makes of `messages`.

    The template sees the variables, filters and functions of transformers' chat templates:
    `tools` and `documents` are None where there are none, keys of a message that are None are
    missing, and reasoning is found under each of its names. The environment is sandboxed, its
    values cannot be changed, and time and memory are bounded.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        messages: Each with `role`, `content` and whatever else the template knows.
        special_tokens: Variables such as `bos_token`.
        add_generation_prompt: Whether to open the assistant's turn.
        tools: JSON schemas of functions.
        documents: What the answer may refer to.
        continue_final_message: End inside the last message, for the model to go on with it.
        variables: Any others, `enable_thinking` for one; they win over special tokens.
        now: What `strftime_now` takes for the time; the clock where None.

    Raises:
        PromptError: the template is broken, refuses the messages, or takes too long.

    Source:
        transformers 5.24, utils/chat_template_utils.py: the behaviour that tests compare with.
    """
    chat = [_normalized(message) for message in messages]
    if continue_final_message:
        _open_last(chat, add_generation_prompt)
    text = _compiled(template).render(
        {
            "tools": tools,
            "documents": documents,
            **special_tokens,
            **(variables or {}),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        },
        now,
    )
    return _cut(text) if continue_final_message else text


def template_problem(template: str, special_tokens: Mapping[str, str]) -> str | None:
    """Why a chat template cannot run; None where it renders a first message of a user.

    A system's message may come before it, since some templates ask for one.
    """
    user = {"role": "user", "content": "Hello"}
    problem = None
    for chat in ([user], [{"role": "system", "content": "Answer briefly."}, user]):
        try:
            render_chat(template, chat, special_tokens=special_tokens, add_generation_prompt=True)
        except TemplateError as error:
            problem = problem or error.reason
        else:
            return None
    return problem


class TemplateError(PromptError):
    """A chat template cannot be compiled, or not rendered with what it was given."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"the model's chat template {reason}{advice}")
        self.reason = reason
        """What the template does, without the advice."""


class _CompiledTemplate:
    """One template, compiled once; renders for one thread at a time."""

    def __init__(self, source: str) -> None:
        self._lock = threading.Lock()
        self._now: datetime.datetime | None = None
        self._environment = self._new_environment()
        self._template = self._compile(source)

    def render(self, variables: dict[str, Any], now: datetime.datetime | None) -> str:
        from .bounded_templates import Budget

        with self._lock:
            self._now = now
            try:
                self._environment.budget = Budget(variables)
                context = self._template.new_context(variables)
                return self._environment.concat(self._template.root_render_func(context))
            except Exception as error:  # any: the template is a program of someone else's
                raise _refusal(error) from error

    def _compile(self, source: str) -> "jinja2.Template":
        from .bounded_templates import MAX_SOURCE

        if len(source) > MAX_SOURCE:
            raise TemplateError(f"has {len(source):,} characters, more than {MAX_SOURCE:,}", _RAW)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's, about the code that jinja writes
                return self._environment.from_string(source)
        except Exception as error:  # besides jinja's own, Python's compiler and recursion
            raise _refusal(error) from error

    def _new_environment(self) -> "BoundedEnvironment":
        from .bounded_templates import BoundedEnvironment

        environment = BoundedEnvironment()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._strftime
        return environment

    def _strftime(self, format: str) -> str:
        return (self._now or datetime.datetime.now()).strftime(format)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> _CompiledTemplate:
    return _CompiledTemplate(template)


def _refusal(error: Exception) -> TemplateError:
    import jinja2

    if isinstance(error, jinja2.TemplateError):
        detail = shown_text(" ".join(str(error).split()), _SHOWN)
        return TemplateError(
            f"cannot render this conversation: {detail}",
            ". Change the messages, or use --raw to send the prompt as it is",
        )
    if isinstance(error, RecursionError):
        detail = "it is nested too deeply, or calls itself without end"
    elif isinstance(error, MemoryError):
        detail = "it takes more memory than there is"
    else:
        detail = shown_text(repr(error), _SHOWN)
    return TemplateError(f"fails on this conversation ({detail})", _RAW)


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without keys that are None, its reasoning under each name that templates read."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _open_last(chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    """Mark where the last message ends."""
    content = chat[-1].get("content") if chat else None
    if add_generation_prompt or not isinstance(content, str):
        raise PromptError(
            "the last message cannot be continued: give one with text as its content, and no "
            "opening of another turn"
        )
    chat[-1]["content"] = f"{content}{_HERE} "


def _cut(text: str) -> str:
    """The text up to the mark; a template that trimmed the message trimmed its end too."""
    before, found, after = text.rpartition(_HERE)
    if not found:
        raise PromptError(
            "the model's chat template does not write the last message as it is, so that it "
            "cannot be continued: let the model begin an answer"
        )
    return before if after.startswith(" ") else before.rstrip()


def _refuse(message: object) -> str:
    import jinja2

    raise jinja2.TemplateError(str(message))
