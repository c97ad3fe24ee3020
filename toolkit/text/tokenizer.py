"""Text to a model's ids and back, from a `tokenizer.json` document."""

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..bridge.vocabulary import SPACE_MARK, alphabet_bytes, kind_of
from ..documents import shown_text
from ..errors import PromptError
from .chat_template import render_chat
from .content_encoding import ContentEncoder
from .content_marks import Values, render_marked
from .tokenizer_config import (
    chat_templates,
    checked_config,
    read_text,
    read_tokenizer_config,
    special_token,
    special_tokens,
)
from .tokenizer_document import parsed_document, parsed_tokenizer
from .unicode import is_unicode

Message = Mapping[str, Any]
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """One model's tokenizer; the document is parsed when first needed.

    Loading Gemma's 33 MB takes about a second, so nothing is parsed before it is used and
    nothing is parsed twice.
    """

    def __init__(self, tokenizer_json: str, config: Mapping[str, Any], origin: str) -> None:
        self._text = tokenizer_json
        self._config = config
        self._origin = origin
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a model folder or of a role in a bundle.

        Raises:
            TokenizerError: there is no readable `tokenizer.json`.
        """
        file = path / "tokenizer.json"
        return cls(read_text(file), read_tokenizer_config(path), str(file))

    @classmethod
    def from_documents(cls, tokenizer_json: str, config: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of a `tokenizer.json` text and a parsed `tokenizer_config.json`.

        Raises:
            TokenizerError: something in the configuration has the wrong type.
        """
        return cls(
            tokenizer_json, checked_config(config, "tokenizer_config.json"), "tokenizer.json"
        )

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        backend = parsed_tokenizer(self._text, self._origin)
        backend.no_truncation()
        backend.no_padding()
        return backend

    @property
    def model(self) -> tokenizers.models.Model:
        """What turns words into ids, for another tokenizer to share."""
        model: tokenizers.models.Model = self._backend.model
        return model

    @functools.cached_property
    def json(self) -> dict[str, Any]:
        """The parsed `tokenizer.json` document; not to be changed."""
        return parsed_document(self._text, self._origin)

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
        """Hex SHA-256 of what decides ids, equal however the same document is laid out."""
        return hashlib.sha256(_canonical(self.json, self.bos_token_id)).hexdigest()

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Ids of `text`; with `add_special`, started by BOS where the model wants one.

        A text that already starts with BOS does not get another. Where `parse_special` is false,
        a text that spells a control token is encoded as text; added tokens that are not special
        (runs of spaces, ``<think>`` of Qwen 3) are found either way.
        """
        _check_unicode(text)
        if parse_special:
            return self._begun(
                self._backend.encode(text, add_special_tokens=False).ids, add_special
            )
        return self._begun(self._content_encoder.encode(text), add_special)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        parse_special: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation: control tokens where the template writes them, content as text.

        Content is all that is given here. Where it spells no control token, the ids are those of
        the rendered text; with `parse_special` they are that always. BOS is put in front where
        the model wants it and the template does not write it.

        Args:
            messages: Each with `role`, `content` and whatever else the template knows.
            add_generation_prompt: End with the opening of the assistant's turn.
            parse_special: Let content that spells a control token be that token.
            tools: JSON schemas of functions.
            documents: What the answer may refer to.
            variables: Any others that the template knows, `enable_thinking` for one.

        Raises:
            PromptError: there is no template, it refuses these messages, or it rewrites content
                that spells a control token.
        """
        now = datetime.datetime.now()

        def render(values: Values) -> str:
            text = self.apply_chat_template(
                values["messages"],
                add_generation_prompt,
                tools=values["tools"],
                documents=values["documents"],
                variables=values["variables"],
                now=now,
            )
            _check_unicode(text)
            return text

        values = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "variables": variables,
        }
        if parse_special:
            return self.encode(render(values), add_special=True)
        marked = render_marked(render, values, list(self._special_texts.values()))
        if not marked.content:
            return self.encode(marked.text, add_special=True)
        return self._begun(self._content_encoder.encode(marked.text, marked.content), True)

    def _begun(self, ids: list[int], add_special: bool) -> list[int]:
        bos = self.bos_token_id
        if add_special and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence; control tokens are left out if `skip_special`.

        The bytes of all tokens, joined: nothing is cleaned up, and U+FFFD stands where they are
        not UTF-8. The one space that the tokenizer puts before every text is not part of it.
        """
        hidden = self.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in hidden)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.has_space_prefix else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, control tokens as written; empty for no token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "byte_level":
            return token.encode() if token_id in self._added else alphabet_bytes(token)
        if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which are not part of a text."""
        return frozenset(i for i, token in self._added.items() if token.special)

    @functools.cached_property
    def _special_texts(self) -> dict[int, str]:
        return {i: token.content for i, token in self._added.items() if token.special}

    @functools.cached_property
    def _content_encoder(self) -> ContentEncoder:
        return ContentEncoder(self._backend, self._special_texts)

    @functools.cached_property
    def has_space_prefix(self) -> bool:
        """Whether a space is put before every text, and taken away after decoding."""
        return any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in self._decoders
        )

    @functools.cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        added: dict[int, tokenizers.AddedToken] = self._backend.get_added_tokens_decoder()
        return added

    @functools.cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """The steps of the decoder; read from the backend, which needs no parse of the document."""
        decoder = self._backend.decoder
        step = {} if decoder is None else json.loads(decoder.__getstate__())
        return list(step.get("decoders", [step]))

    @functools.cached_property
    def _kind(self) -> str:
        return kind_of({"model": {"type": "BPE"}, "decoder": {"decoders": self._decoders}})

    @functools.cached_property
    def _has_byte_tokens(self) -> bool:
        return any(step["type"] == "ByteFallback" for step in self._decoders)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(chat_templates(self._config))

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """The prompt that the model's chat template makes of `messages`; see `render_chat`.

        The text does not show what of it is content: `encode_chat` gives ids that do.

        Raises:
            PromptError: there is no template, or it refuses these messages.
        """
        templates = chat_templates(self._config)
        template = templates.get("tool_use") if tools is not None else None
        template = template or templates.get("default")
        if template is None:
            named = shown_text(", ".join(map(repr, sorted(templates))))
            raise PromptError(
                f"this model has chat templates for {named} only: use --raw"
                if templates
                else "this model has no chat template, so it continues text instead of "
                "answering: use --raw"
            )
        return render_chat(
            template,
            messages,
            special_tokens=special_tokens(self._config),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            variables=variables,
            now=now,
        )


def _check_unicode(text: str) -> None:
    if not is_unicode(text):
        raise PromptError(
            "the text is not valid UTF-8: it holds half of a surrogate pair. "
            "Save it as UTF-8 and try again"
        )


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
