"""The tokenizer of a Hugging Face folder, with the ids that begin and end a sequence."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omnidraft_npu.documents import TokenId, convert_document
from omnidraft_npu.errors import CheckpointError, TokenizerError
from omnidraft_npu.text.tokenizer_config import (
    chat_templates,
    read_text,
    read_tokenizer_config,
    special_token,
)
from omnidraft_npu.text.tokenizer_document import parsed_document, parsed_tokenizer

from ..checkpoints.checkpoint import TokenizerFiles
from ..checkpoints.json_file import read_object
from .tokenizer_checks import token_ids

# Chat models end a turn with one of these, whatever their configuration calls the end.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")

_ADVICE = "correct it, or get the file again"


@dataclass(frozen=True, kw_only=True)
class _Ids:
    """The special ids of a configuration that are used here."""

    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer that `read_tokenizer` may read."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Tokenizer documents of a folder and its special ids.

    Raises:
        TokenizerError: there is no tokenizer, or a document of it is damaged.
        CheckpointError: a special id of a configuration is no id of a token.
    """
    settings = read_tokenizer_config(folder)
    if (folder / "tokenizer.json").is_file():
        files = _from_json(folder / "tokenizer.json", settings)
    elif (folder / "tokenizer.model").is_file():
        from .sentencepiece_tokenizer import tokenizer_from_sentencepiece

        files = tokenizer_from_sentencepiece(folder / "tokenizer.model", settings)
    else:
        raise TokenizerError(
            f"{folder.name} has neither tokenizer.json nor tokenizer.model; get the whole "
            "checkpoint, or save a fast tokenizer into it with transformers"
        )
    known = token_ids(parsed_document(files.tokenizer_json, f"{folder.name}/tokenizer.json"))
    ends = dict.fromkeys((*_configured_ends(folder, known), *files.eos_token_ids))
    return replace(files, eos_token_ids=tuple(ends))


def _from_json(path: Path, settings: dict[str, Any]) -> TokenizerFiles:
    shown = f"{path.parent.name}/{path.name}"
    document = read_text(path)
    tokenizer = parsed_tokenizer(document, shown)
    ends = [special_token(settings, "eos_token")]
    written = "".join(chat_templates(settings).values())
    ends += [token for token in _END_OF_TURN if token in written]
    ids = (tokenizer.token_to_id(token) for token in ends if token is not None)
    return TokenizerFiles(
        tokenizer_json=document,
        tokenizer_config=settings,
        eos_token_ids=tuple(dict.fromkeys(i for i in ids if i is not None)),
        bos_token_id=_first_id(tokenizer, settings),
    )


def _first_id(tokenizer: Any, settings: Mapping[str, Any]) -> int | None:
    """The id that begins every sequence, None where the tokenizer adds none.

    `add_bos_token` decides where it is given; otherwise the post-processor does.
    """
    wanted = settings.get("add_bos_token")
    if wanted is False:
        return None
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    if full[:1] != plain[:1]:
        return int(full[0])
    token = special_token(settings, "bos_token")
    if wanted and token is not None:
        found: int | None = tokenizer.token_to_id(token)
        return found
    return None


def _configured_ends(folder: Path, known: Collection[int]) -> Iterator[int]:
    """Every `eos_token_id` of the generation and the model configuration, one or several each.

    Raises:
        CheckpointError: it, or a `bos_token_id`, is no id of a token.
    """
    for name in ("generation_config.json", "config.json"):
        document = read_object(folder / name, optional=True)
        inner = document.get("text_config")
        where = f"{folder.name}/{name}"
        for part, place in ((document, where), (inner, f"{where}: text_config")):
            if isinstance(part, dict):
                yield from _ends(part, place, known)


def _ends(document: Mapping[str, Any], where: str, known: Collection[int]) -> list[int]:
    wanted = {key: document[key] for key in ("bos_token_id", "eos_token_id") if key in document}
    found = convert_document(wanted, _Ids, where, error=CheckpointError, advice=_ADVICE)
    ends = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    ids = [i for i in ends if i is not None]
    for key, token_id in (
        ("bos_token_id", found.bos_token_id),
        *(("eos_token_id", i) for i in ids),
    ):
        if token_id is not None and token_id not in known:
            raise CheckpointError(
                f"{where}: {key} is {token_id}, which is none of the tokenizer's tokens: {_ADVICE}"
            )
    return ids
