"""The tokenizer of a Hugging Face folder, with the ids that begin and end a sequence."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omnidraft_npu.errors import TokenizerError

from ..checkpoints.checkpoint import TokenizerFiles
from ..checkpoints.json_file import read_object

# Chat models end a turn with one of these, whatever their configuration calls the end.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Tokenizer documents of a folder and its special ids.

    Raises:
        TokenizerError: there is no tokenizer, or a document of it is damaged.
    """
    settings = _settings(folder)
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
    ends = dict.fromkeys((*_configured_ends(folder), *files.eos_token_ids))
    return replace(files, eos_token_ids=tuple(ends))


def _settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the one chat template that counts as a string."""
    settings = read_object(
        folder / "tokenizer_config.json", optional=True, error_type=TokenizerError
    )
    template = settings.pop("chat_template", None)
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        template = beside.read_text(encoding="utf-8")
    return settings if template is None else settings | {"chat_template": template}


def _from_json(path: Path, settings: dict[str, Any]) -> TokenizerFiles:
    from tokenizers import Tokenizer

    try:
        document = path.read_text(encoding="utf-8-sig")
        tokenizer = Tokenizer.from_str(document)
    except Exception as error:  # tokenizers raises nothing narrower
        raise TokenizerError(
            f"{path.parent.name}/{path.name} is not a tokenizer: {error}; get the file again"
        ) from error
    ends = [_text(settings.get("eos_token"))]
    template = settings.get("chat_template", "")
    ends += [token for token in _END_OF_TURN if token in template]
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
    token = _text(settings.get("bos_token"))
    if wanted and token is not None:
        found: int | None = tokenizer.token_to_id(token)
        return found
    return None


def _text(token: Any) -> str | None:
    """Text of a special token, which is a string or an object with a `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _configured_ends(folder: Path) -> Iterator[int]:
    """`eos_token_id` of the generation and the model configuration; one id or several."""
    model = read_object(folder / "config.json", optional=True)
    generation = read_object(folder / "generation_config.json", optional=True)
    for document in (generation, model, model.get("text_config") or {}):
        value = document.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int):
                yield token_id
