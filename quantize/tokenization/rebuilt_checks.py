"""Whether a rebuilt tokenizer does what its kind is known to do; a wrong one is refused."""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from omnidraft_npu.errors import TokenizerError
from omnidraft_npu.text.tokenizer_document import parsed_tokenizer

from .pretokenizers import PreTokenizer
from .tokenizer_documents import Piece, PieceKind

# Every character class that a way of splitting treats on its own.
_SAMPLES = (
    "Hello, world! It's 2024.",
    "  two  spaces\tand\ttabs\n\n\nlines\r\n",
    "def f(x):\n        return x ** 2  # 3.14\n",
    "naïve café über straße",
    "日本語 한국어 中文",
    "emoji 😀 👩‍👩‍👧 🇩🇪",
    " ",
    "x" + " " * 33 + "y",
)


def check_rebuilt(tokenizer_json: str, pieces: Sequence[Piece], pre: PreTokenizer | None) -> None:
    """Pass if texts are split as `pre` is known to, come back whole, and ids are where they were.

    Args:
        tokenizer_json: The rebuilt document.
        pieces: What it was rebuilt from.
        pre: Its known way of splitting; None where text is merged without being split.

    Raises:
        TokenizerError: naming the first thing that is wrong.
    """
    tokenizer = parsed_tokenizer(tokenizer_json, "what the model file's tokens and merges give")
    problems = [*_split_problems(tokenizer, pre)] if pre is not None else []
    problems += _id_problems(tokenizer, pieces)
    problems += _text_problems(tokenizer, pieces)
    if problems:
        raise TokenizerError(
            f"the tokenizer rebuilt from the model file is wrong: {problems[0]}. "
            "Use the Hugging Face checkpoint of this model"
        )


def _split_problems(tokenizer: Any, pre: PreTokenizer) -> Iterator[str]:
    for text, expected in pre.splits.items():
        spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        # The parts of one character that was cut, where there are any, overlap.
        found = tuple(text[start:end] for start, end in spans)
        if found != expected:
            yield f"{text!r} is split into {found}, not into {expected}"


def _id_problems(tokenizer: Any, pieces: Sequence[Piece]) -> Iterator[str]:
    """Tokens that have another id than in the file, and added ones not found in a text."""
    for i, piece in enumerate(pieces):
        if piece.kind == PieceKind.UNUSED:
            continue
        if tokenizer.token_to_id(piece.text) != i:
            yield f"token {piece.text!r} of id {i} has id {tokenizer.token_to_id(piece.text)}"
    kinds = (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    added = [i for i, piece in enumerate(pieces) if piece.kind in kinds]
    for i in added[:64]:
        text = pieces[i].text
        if tokenizer.encode(text, add_special_tokens=False).ids != [i]:
            yield f"the text {text!r} does not give the one id {i}"


def _text_problems(tokenizer: Any, pieces: Sequence[Piece]) -> Iterator[str]:
    unknown = {i for i, piece in enumerate(pieces) if piece.kind == PieceKind.UNKNOWN}
    for text in _SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if unknown.intersection(ids):  # a vocabulary without byte tokens cannot write everything
            continue
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if _comparable(back) != _comparable(text):
            yield f"{text!r} comes back as {back!r}"


def _comparable(text: str) -> str:
    """A text without what some tokenizers rightly change: composed, and not begun by spaces."""
    return unicodedata.normalize("NFC", text).lstrip(" ")
