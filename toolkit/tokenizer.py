"""Text to a model's ids and back, from a `tokenizer.json` document."""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import render_chat
from .errors import PromptError, TokenizerError

Message = Mapping[str, str]


class Tokenizer:
    """One model's tokenizer; the document is parsed when first needed.

    Loading Gemma's 33 MB takes about a second, so nothing is parsed before it is used and
    nothing is parsed twice.
    """

    def __init__(self, tokenizer_json: str, config: Mapping[str, Any], origin: str) -> None:
        self._text = tokenizer_json
        self._config = config
        self._origin = origin

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a model folder or of a role in a bundle.

        Raises:
            TokenizerError: there is no readable `tokenizer.json`.
        """
        file = path / "tokenizer.json"
        return cls(_read(file), read_tokenizer_config(path), str(file))

    @classmethod
    def from_documents(cls, tokenizer_json: str, config: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of a `tokenizer.json` text and a parsed `tokenizer_config.json`."""
        return cls(tokenizer_json, config, "tokenizer.json")

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        try:
            backend = tokenizers.Tokenizer.from_str(self._text)
        except Exception as error:
            raise TokenizerError(f"{self._origin} is not a usable tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return backend

    @functools.cached_property
    def json(self) -> dict[str, Any]:
        """The parsed `tokenizer.json` document; not to be changed."""
        try:
            document: dict[str, Any] = json.loads(self._text)
        except ValueError as error:
            raise TokenizerError(f"{self._origin} is not JSON: {error}") from error
        return document

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed `tokenizer_config.json`; empty where there is none."""
        return self._config

    @functools.cached_property
    def size(self) -> int:
        """One more than the highest id that stands for a token, added ones included.

        The model may have more rows than this (padding) and then those are never text.
        """
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        """First id of every sequence; None where the model wants none."""
        wanted = self._config.get("add_bos_token")
        if wanted is None:
            template = self._backend.encode("", add_special_tokens=True).ids
            return template[0] if template else None
        text = special_token(self._config, "bos_token")
        return self._backend.token_to_id(text) if wanted and text else None

    @functools.cached_property
    def content_sha256(self) -> str:
        """Hex SHA-256 of what decides ids; equal for equal tokenizers however the files are laid out."""
        return hashlib.sha256(_canonical(self.json, self.bos_token_id)).hexdigest()

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of `text`; with `add_special`, started by BOS where the model wants one.

        A text that already starts with BOS (most chat templates write it) does not get another.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except UnicodeEncodeError as error:
            raise PromptError(
                "the prompt is not valid UTF-8: it holds half of a surrogate pair at "
                f"character {error.start}. Save it as UTF-8 and try again"
            ) from error
        bos = self.bos_token_id
        if add_special and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, every space as it is; control tokens left out if `skip_special`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return chat_template_of(self._config) is not None

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """The prompt that the model's chat template makes of `messages`.

        Args:
            messages: Each with `role` and `content`.
            add_generation_prompt: End with the opening of the assistant's turn.

        Raises:
            PromptError: there is no template, or it refuses these messages.
        """
        template = chat_template_of(self._config)
        if template is None:
            raise PromptError(
                "this model has no chat template, so it continues text instead of answering: "
                "use --raw"
            )
        names = {
            name: special_token(self._config, name)
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        return render_chat(
            template,
            messages,
            special_tokens={name: text for name, text in names.items() if text is not None},
            add_generation_prompt=add_generation_prompt,
        )


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with the chat template of a `chat_template.jinja` beside it.

    Empty where the folder has neither.
    """
    config: dict[str, Any] = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        try:
            config = json.loads(_read(file))
        except ValueError as error:
            raise TokenizerError(f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise TokenizerError(f"{file} must hold a JSON object, not {type(config).__name__}")
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = _read(template)
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


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TokenizerError(f"{file} does not exist: the model has no tokenizer") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _canonical(document: Mapping[str, Any], bos_token_id: int | None) -> bytes:
    """A byte string that is equal for documents which give the same ids.

    Left out: the decoder, truncation, padding, offsets, and the post-processor (BOS is what
    it decides). Merges are written as pairs or as one string, by version of the library.
    """
    model = {
        key: value for key, value in document["model"].items() if value not in (None, "", False)
    }
    if "merges" in model:
        model["merges"] = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]
        ]
    added = {token["id"]: token for token in document.get("added_tokens", ())}
    parts = {
        "added_tokens": [added[key] for key in sorted(added)],
        "bos_token_id": bos_token_id,
        "model": model,
        "normalizer": document.get("normalizer"),
        "pre_tokenizer": document.get("pre_tokenizer"),
    }
    return json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
