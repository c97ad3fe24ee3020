"""Documents beside a `tokenizer.json`: special tokens by role, and the chat templates.

Read in the order of transformers: a `chat_template.jinja` counts before the templates in
`tokenizer_config.json`; a `special_tokens_map.json` counts before its tokens, but only adds roles
that have none where the configuration describes its added tokens (newer versions of transformers
write those and no map).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..documents import convert_document, read_bytes, read_document, shown_text
from ..errors import TokenizerError

ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_ADVICE = "get the file again"
_MAX_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class _Token:
    content: str
    special: bool = False


@dataclass(frozen=True, kw_only=True)
class _NamedTemplate:
    name: str
    template: str


@dataclass(frozen=True, kw_only=True)
class _Config:
    """The keys of a `tokenizer_config.json` that are used here."""

    chat_template: str | list[_NamedTemplate] | dict[str, str] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    add_bos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    extra_special_tokens: dict[str, str | _Token] | list[str | _Token] | None = None
    model_specific_special_tokens: dict[str, str | _Token] = field(default_factory=dict)
    added_tokens_decoder: dict[str, _Token] | None = None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with the special tokens and the chat templates beside it.

    Empty where the folder has none of them.

    Raises:
        TokenizerError: a document is damaged; the message names the file and the key.
    """
    config = _read_object(folder / "tokenizer_config.json")
    named = _read_object(folder / "special_tokens_map.json")
    config = {**named, **config} if "added_tokens_decoder" in config else {**config, **named}
    templates = _read_templates(folder)
    if templates:
        if "default" not in templates:
            templates = {**chat_templates(config), **templates}
        config["chat_template"] = (
            templates["default"] if list(templates) == ["default"] else _listed(templates)
        )
    return config


def checked_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The configuration, if all that is used of it has the right types.

    Raises:
        TokenizerError: it has not; `where` names it in the message.
    """
    convert_document(dict(config), _Config, where, error=TokenizerError, advice=_ADVICE)
    return dict(config)


def special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Text of the special token `name` (`bos_token`, …) in a tokenizer configuration."""
    return _text(config.get(name))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Text of every special token that has a name: the seven roles, and a model's own."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        more = config.get(key)
        named |= more if isinstance(more, Mapping) else {}
    texts = {name: _text(value) for name, value in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def chat_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a tokenizer configuration by name; the only one is `default`."""
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return dict(value) if isinstance(value, Mapping) else {}


def read_text(file: Path) -> str:
    """Text of one of a tokenizer's files, without a byte order mark.

    Raises:
        TokenizerError: it is absent, unreadable, too large or not UTF-8.
    """
    if not file.exists():
        raise TokenizerError(f"{file} does not exist: the model has no tokenizer")
    data = read_bytes(
        file, error=TokenizerError, advice=_ADVICE, shown=str(file), max_bytes=_MAX_BYTES
    )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{file} is not UTF-8 ({shown_text(str(error))}): {_ADVICE}"
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    shown = f"{file.parent.name}/{file.name}"
    found: dict[str, Any] = read_document(
        file,
        dict[str, Any],
        error=TokenizerError,
        advice=_ADVICE,
        shown=shown,
        max_bytes=_MAX_BYTES,
    )
    return checked_config(found, shown)


def _read_templates(folder: Path) -> dict[str, str]:
    """Chat templates in files of their own."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: read_text(file) for name, file in files.items() if file.is_file()}


def _listed(templates: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


def _text(value: object) -> str | None:
    """Text of a special token, which is a string or an object with a `content`."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
