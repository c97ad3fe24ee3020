"""The tokenizer of a folder that has a SentencePiece `tokenizer.model` and no `tokenizer.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from omnidraft_npu.documents import read_document, shown_value
from omnidraft_npu.errors import TokenizerError
from omnidraft_npu.text.tokenizer_config import special_token

from ..checkpoints.checkpoint import TokenizerFiles
from .rebuilt_checks import check_rebuilt
from .sentencepiece_file import read_sentencepiece
from .tokenizer_documents import Piece, PieceKind, SpacePrefix, space_mark_document, to_json

_ADVICE = "get the file again"
_MOST_IDS = 2**22
_AddedId = Annotated[int, Meta(ge=0, lt=_MOST_IDS)]


def tokenizer_from_sentencepiece(path: Path, tokenizer_config: dict[str, Any]) -> TokenizerFiles:
    """The tokenizer of a `tokenizer.model` and of the added tokens around it.

    Args:
        path: The SentencePiece file; `added_tokens.json` may lie beside it.
        tokenizer_config: Parsed `tokenizer_config.json`. `add_bos_token` counts as true where
            it is absent. `legacy: false` puts the space before the whole text only, not after
            each special token too.

    Raises:
        TokenizerError: the file is damaged, or describes a tokenizer that is not supported.
    """
    model = read_sentencepiece(path)
    pieces = _with_added(model.pieces, _added_tokens(path.parent, tokenizer_config))
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    bos = special_token(tokenizer_config, "bos_token") or "<s>"
    eos = special_token(tokenizer_config, "eos_token") or "</s>"
    wants_bos = bos in ids and bool(tokenizer_config.get("add_bos_token", True))
    prefix: SpacePrefix = "never"
    if tokenizer_config.get("add_prefix_space", model.add_space_prefix):
        prefix = "first" if tokenizer_config.get("legacy") is False else "always"
    document = space_mark_document(pieces, space_prefix=prefix, bos=bos if wants_bos else None)
    text = to_json(document)
    check_rebuilt(text, pieces, None)
    roles = {"bos_token": bos, "eos_token": eos}
    return TokenizerFiles(
        tokenizer_json=text,
        tokenizer_config={
            **tokenizer_config,
            **{role: token for role, token in roles.items() if token in ids},
            "add_bos_token": wants_bos,
        },
        eos_token_ids=(ids[eos],) if eos in ids else (),
        bos_token_id=ids[bos] if wants_bos else None,
    )


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, Piece]:
    """Tokens that the folder's documents add to the model, or whose kind they change, by id."""
    added: dict[int, Piece] = {}
    beside = folder / "added_tokens.json"
    if beside.is_file():
        shown = f"{folder.name}/{beside.name}"
        ids: dict[str, int] = read_document(
            beside, dict[str, _AddedId], error=TokenizerError, advice=_ADVICE, shown=shown
        )
        added = {i: Piece(text=text, kind=PieceKind.USER_DEFINED) for text, i in ids.items()}
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        if not (key.isascii() and key.isdecimal() and int(key[:10]) < _MOST_IDS):
            raise TokenizerError(
                f"{folder.name}/tokenizer_config.json: added_tokens_decoder has the key "
                f"{shown_value(key)}, must be an id below {_MOST_IDS}: {_ADVICE}"
            )
        kind = PieceKind.CONTROL if token.get("special") else PieceKind.USER_DEFINED
        added[int(key)] = Piece(text=token["content"], kind=kind)
    return added


def _with_added(pieces: Sequence[Piece], added: Mapping[int, Piece]) -> list[Piece]:
    """All pieces by id; ids that neither side has are unused."""
    size = max(len(pieces), max(added, default=-1) + 1)
    filler = Piece(text="", kind=PieceKind.UNUSED)
    joined = [*pieces, *[filler] * (size - len(pieces))]
    for i, piece in added.items():
        if joined[i].kind != PieceKind.UNKNOWN:
            joined[i] = piece
    return joined
