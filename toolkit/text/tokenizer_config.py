"""What `tokenizer_config.json` says: special tokens by role, and the chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with the chat template of a `chat_template.jinja` beside it.

    Empty where the folder has neither.
    """
    config: dict[str, Any] = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        try:
            config = json.loads(read_text(file))
        except ValueError as error:
            raise TokenizerError(f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise TokenizerError(f"{file} must hold a JSON object, not {type(config).__name__}")
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = read_text(template)
    return config


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Text of the special token `name` (`bos_token`, …) in a tokenizer configuration."""
    value = config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def chat_template_of(config: Mapping[str, Any]) -> str | None:
    """The chat template in a tokenizer configuration; the one named `default` of several."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def read_text(file: Path) -> str:
    """Text of one of a tokenizer's files.

    Raises:
        TokenizerError: it is absent, unreadable or not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TokenizerError(f"{file} does not exist: the model has no tokenizer") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
