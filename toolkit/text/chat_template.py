"""Chat templates, rendered where a template from a stranger can do no harm."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PromptError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """The prompt text that a jinja `template` makes of `messages`.

    The environment is sandboxed and its values cannot be changed. It offers what published
    templates use: `raise_exception`, `strftime_now`, `tojson`, loop controls.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        messages: Each with `role` and `content`.
        special_tokens: Variables such as `bos_token`.
        add_generation_prompt: Whether to open the assistant's turn.

    Raises:
        PromptError: the template is broken or refuses the messages.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **special_tokens
        )
    except jinja2.TemplateError as error:
        detail = " ".join(str(error).split())
        raise PromptError(
            f"the model's chat template cannot render this conversation: {detail}. "
            "Change the messages, or use --raw to send the prompt as it is"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PromptError(
            f"the model's chat template fails on this conversation ({error!r}): "
            "use --raw to send the prompt as it is"
        ) from error


def _refuse(message: str) -> str:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON as a prompt wants it: jinja's own filter escapes HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
