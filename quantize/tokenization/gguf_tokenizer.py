"""The exact tokenizer of a GGUF file, whose metadata keeps tokens but not how text is split."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnidraft_npu.documents import convert_document
from omnidraft_npu.errors import TokenizerError

from ..checkpoints.checkpoint import TokenizerFiles
from .pretokenizers import PRETOKENIZERS, PreTokenizer
from .rebuilt_checks import check_rebuilt
from .tokenizer_documents import (
    SPACE_MARK,
    Piece,
    PieceKind,
    byte_level_document,
    space_mark_document,
    to_json,
)

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_ADVICE = "it is damaged, get it again"
# Gemma's file and its published `tokenizer.json` differ in which tokens are special: there
# the marks of an image are, though user-defined, and the reserved names are not, though control.
_IMAGE_MARK = re.compile(r"<(start|end)_of_image>")
_RESERVED = re.compile(r"<(mask|unused\d+)>")
_KINDS = frozenset(map(int, PieceKind))
# Control tokens that end a response whatever the file calls its end.
_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>")


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> TokenizerFiles:
    """The tokenizer that a GGUF file's metadata describes, rebuilt exactly or not at all.

    Args:
        fields: Metadata key -> value, arrays as sequences.

    Raises:
        TokenizerError: the metadata lacks something, or describes a tokenizer whose way of
            splitting text is not known here.
    """
    model = fields.get(_PREFIX + "model")
    if model == "gpt2":
        return _byte_level(fields)
    if model == "llama":
        return _space_mark(fields)
    raise TokenizerError(
        f"the GGUF file's tokenizer model {model!r} is not supported, only 'gpt2' and 'llama' "
        "are: use the Hugging Face checkpoint of this model"
    )


def _byte_level(fields: Mapping[str, Any]) -> TokenizerFiles:
    name = fields.get(_PREFIX + "pre")
    pre = PRETOKENIZERS.get(str(name))
    if pre is None:
        known = ", ".join(PRETOKENIZERS)
        raise TokenizerError(
            f"the GGUF file splits text the way it calls {name!r}, which is not known (known: "
            f"{known}), and a guess would give wrong ids: use the Hugging Face checkpoint "
            "of this model"
        )
    pieces = _pieces(fields)
    bos = _wanted_bos(fields, pieces, default=pre.adds_bos)
    merges = [_pair(text) for text in _array(fields, "merges", str)]
    document = byte_level_document(pieces, merges, pre, _text(pieces, bos))
    return _files(fields, pieces, document, bos, pre)


def _space_mark(fields: Mapping[str, Any]) -> TokenizerFiles:
    if (
        _flag(fields, "remove_extra_whitespaces", False)
        or (_PREFIX + "precompiled_charsmap") in fields
    ):
        raise TokenizerError(
            "the GGUF file's tokenizer rewrites its text (remove_extra_whitespaces or a character "
            "map), which is not supported: use the Hugging Face checkpoint of this model"
        )
    values = _array(fields, "scores", float)
    if not all(map(math.isfinite, values)):
        raise TokenizerError(
            f"{_PREFIX}scores of the GGUF file holds NaN or infinity, which leaves the order of "
            f"merges open: {_ADVICE}"
        )
    pieces = _pieces(fields, scores=values)
    scores = [piece.score for piece in pieces if piece.kind == PieceKind.NORMAL]
    if len(scores) > 2 * len(set(scores)):
        raise TokenizerError(
            "the GGUF file gives most tokens the same score, which loses the order of merges: "
            "use the Hugging Face checkpoint of this model"
        )
    bos = _wanted_bos(fields, pieces, default=True)
    document = space_mark_document(
        pieces,
        space_prefix="always" if _flag(fields, "add_space_prefix", True) else "never",
        bos=_text(pieces, bos),
    )
    return _files(fields, pieces, document, bos, None)


def _files(
    fields: Mapping[str, Any],
    pieces: Sequence[Piece],
    document: Mapping[str, Any],
    bos: int | None,
    pre: PreTokenizer | None,
) -> TokenizerFiles:
    text = to_json(document)
    check_rebuilt(text, pieces, pre)
    config: dict[str, Any] = {
        "add_bos_token": bos is not None,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for key, role in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("unk_token", "unknown"),
        ("pad_token", "padding"),
    ):
        token = _text(pieces, _special_id(fields, role, len(pieces), is_needed=role == "eos"))
        if token is not None:
            config[key] = token
    templates = _templates(fields)
    if templates:
        config["chat_template"] = templates
    return TokenizerFiles(
        tokenizer_json=text,
        tokenizer_config=config,
        eos_token_ids=tuple(dict.fromkeys(_ends(fields, pieces))),
        bos_token_id=bos,
    )


def _templates(fields: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """The chat template; several as `tokenizer_config.json` has them; empty for none."""
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in fields.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    where = f"{prefix} of the GGUF file"
    templates = convert_document(found, dict[str, str], where, error=TokenizerError, advice=_ADVICE)
    if list(templates) == ["default"]:
        return templates["default"]
    return [{"name": name, "template": text} for name, text in templates.items() if text]


def _pieces(fields: Mapping[str, Any], scores: Sequence[float] | None = None) -> list[Piece]:
    """The tokens in the order of their ids."""
    texts = _array(fields, "tokens", str)
    kinds = _array(fields, "token_type", int)
    for name, values in (("token_type", kinds), ("scores", scores)):
        if values is not None and len(values) != len(texts):
            raise TokenizerError(
                f"the GGUF file has {len(texts)} tokens but {len(values)} {_PREFIX}{name}: "
                "it is damaged, get it again"
            )
    has_marks = scores is not None
    pieces = []
    for i, (text, number) in enumerate(zip(texts, kinds, strict=True)):
        if number not in _KINDS:
            raise TokenizerError(
                f"token {i} of the GGUF file has type {number}, which is not known: the file is "
                "damaged or newer than this tool"
            )
        kind = PieceKind(number)
        # Converters write the spaces of user-defined tokens as they are.
        if has_marks and kind == PieceKind.USER_DEFINED:
            text = text.replace(" ", SPACE_MARK)
        pieces.append(
            Piece(
                text=text,
                kind=kind,
                score=0.0 if scores is None else float(scores[i]),
                is_special=_special_by_name(text, kind) if has_marks else None,
            )
        )
    return pieces


def _special_by_name(text: str, kind: PieceKind) -> bool | None:
    """Whether a token of Gemma is special, where its kind says otherwise."""
    if kind == PieceKind.USER_DEFINED and _IMAGE_MARK.fullmatch(text):
        return True
    if kind == PieceKind.CONTROL and _RESERVED.fullmatch(text):
        return False
    return None


def _array(fields: Mapping[str, Any], name: str, kind: Any) -> list[Any]:
    key = _PREFIX + name
    values = fields.get(key)
    if values is None:
        raise TokenizerError(
            f"the GGUF file has no {_PREFIX}{name}, without which its tokenizer cannot be rebuilt: "
            "use the Hugging Face checkpoint of this model"
        )
    return convert_document(
        values, list[kind], f"{key} of the GGUF file", error=TokenizerError, advice=_ADVICE
    )


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(_PREFIX + name)
    if value is None:
        return default
    where = f"{_PREFIX}{name} of the GGUF file"
    return convert_document(value, bool, where, error=TokenizerError, advice=_ADVICE)


def _pair(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _wanted_bos(fields: Mapping[str, Any], pieces: Sequence[Piece], default: bool) -> int | None:
    """The id that begins every sequence, None where the model wants none."""
    if not _flag(fields, "add_bos_token", default):
        return None
    return _special_id(fields, "bos", len(pieces), is_needed=True)


def _special_id(
    fields: Mapping[str, Any], role: str, size: int, *, is_needed: bool = False
) -> int | None:
    """The id of a role; None where there is none, or a wrong one that nothing needs.

    llama.cpp too warns of a wrong id, converters write 4294967295 for none, and goes on.
    """
    key = f"{_PREFIX}{role}_token_id"
    value = fields.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and 0 <= value < size:
        return int(value)
    if is_needed or not is_number:
        raise TokenizerError(
            f"{key} is {value!r:.40}, but the GGUF file has {size} tokens: it is damaged, get it "
            "again"
        )
    logger.warning("%s is %s, the GGUF file has %s tokens: not used", key, value, size)
    return None


def _text(pieces: Sequence[Piece], token_id: int | None) -> str | None:
    return None if token_id is None else pieces[token_id].text


def _ends(fields: Mapping[str, Any], pieces: Sequence[Piece]) -> Iterator[int]:
    """Every id that ends a response: the declared ones first, then those known by name."""
    for role in ("eos", "eot", "eom"):
        token_id = _special_id(fields, role, len(pieces), is_needed=role == "eos")
        if token_id is not None:
            yield token_id
    for i, piece in enumerate(pieces):
        if piece.kind == PieceKind.CONTROL and piece.text in _ENDS:
            yield i
