"""A `tokenizer.json`, parsed once: by the library for ids, and as a document for vocabularies."""

from dataclasses import dataclass
from typing import Any

import tokenizers

from ..documents import TokenId, convert_document, parse_document, shown_text
from ..errors import TokenizerError

_ADVICE = "get the tokenizer again"
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class _AddedToken:
    id: TokenId
    content: str
    special: bool = False


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The keys of a model that are used here; a Unigram model has scores in its list."""

    vocab: dict[str, TokenId] | list[tuple[str, float]]
    type: str | None = None
    merges: list[str | tuple[str, str]] | None = None
    unk_token: str | None = None
    byte_fallback: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Document:
    model: _Model
    added_tokens: list[_AddedToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def parsed_document(text: str, origin: str) -> dict[str, Any]:
    """The document as JSON has it, whatever is used of it of the right type.

    Args:
        text: A `tokenizer.json`.
        origin: What to call it in an error.

    Raises:
        TokenizerError: it is damaged; the message names the key.
    """
    document: dict[str, Any] = parse_document(
        text, dict[str, Any], origin, error=TokenizerError, advice=_ADVICE
    )
    convert_document(document, _Document, origin, error=TokenizerError, advice=_ADVICE)
    return document


def parsed_tokenizer(text: str, origin: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of a document.

    Raises:
        TokenizerError: it cannot read the document.
    """
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerError(
            f"{origin} is not a tokenizer ({shown_text(str(error), _SHOWN)}): {_ADVICE}"
        ) from error
